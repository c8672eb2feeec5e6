"""Fixtures of more than one file."""

from worker_stand_in import worker

__all__ = ["worker"]
