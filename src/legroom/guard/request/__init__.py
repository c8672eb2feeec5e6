"""Reads a request body: its prompts, media, output length, and whether the policy allows it."""
