"""Recording rules and alerts, with their levels, sentences and runbooks."""
