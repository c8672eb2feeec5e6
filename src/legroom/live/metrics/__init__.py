"""Scraping, parsing and windows of vLLM's metrics."""
