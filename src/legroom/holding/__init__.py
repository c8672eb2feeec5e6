"""What stays: the self-healing launch, verification under load, the sidecar and its policy.

Sees through `live`, acts through `actions`.
"""
