"""`legroom watch` and its sidecar: looks, incidents, the policy, and restarts."""
