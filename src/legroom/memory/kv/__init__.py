"""The KV cache: a spec a kind of layer, groups, pages, blocks, and the checks of a release."""
