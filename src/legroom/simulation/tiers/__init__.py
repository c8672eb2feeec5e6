"""KV cache beyond the GPU: what vLLM's native offloading stores on the host, loads back and evicts."""
