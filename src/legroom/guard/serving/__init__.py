"""Applies admission to HTTP: as vLLM middleware or as a reverse proxy."""
