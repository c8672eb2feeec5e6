"""What a vLLM release answers, one module a part of `facts/data/vllm/RELEASE.json`."""
