"""`legroom watch` and its sidecar: scrapes, incidents, the policy, and restarts."""
