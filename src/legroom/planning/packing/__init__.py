"""Several servers on one machine: the cards and the KV cache size of each, so that all start in any order."""
