"""Launching, draining, restarting and scaling servers; one file per platform."""
