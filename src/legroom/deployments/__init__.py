"""Readers of every file or text that starts a server; `lint` checks what they read."""
