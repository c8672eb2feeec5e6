"""Proving that a server holds what was planned: one request, one at the full context, then the planned load."""
