"""The gate: Kubernetes asks before it takes a manifest, and is told whether its vLLM can start."""
