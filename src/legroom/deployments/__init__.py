"""Readers of every file or text that a server is started from; nothing here judges what it reads."""
