"""A validating admission webhook for Kubernetes that refuses manifests whose vLLM cannot start."""
