"""Readers of workloads, one file a format."""
