"""Estimates how many KV cache blocks a request will hold."""
