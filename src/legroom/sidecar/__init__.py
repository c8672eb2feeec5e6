"""`legroom watch` and its sidecar: scrapes, incidents, the policy, and restarts."""

WATCH_PORT = 9477
"""The default port of its /metrics."""
