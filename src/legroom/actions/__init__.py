"""Changing the world: launch, drain, restart, free; one file a platform. Nothing here detects anything."""
