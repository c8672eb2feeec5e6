"""The dashboard: its panels by subject, built with the Grafana Foundation SDK."""
