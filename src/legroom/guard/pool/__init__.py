"""Admits requests by what the KV cache holds now and is projected to hold."""
