"""Bytes: pure functions from a deployment to a layout."""
