"""The profile run of a vision or audio encoder."""
