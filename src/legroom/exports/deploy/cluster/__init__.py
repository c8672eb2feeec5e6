"""A planned server as objects of a Kubernetes cluster: one pod, or a group of them over several nodes."""
