"""`legroom watch` and its sidecar: looks, incidents, the policy, and restarts."""

WATCH_PORT = 9477
"""The port of its /metrics by default."""
