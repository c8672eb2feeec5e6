"""Fixtures of more than one file."""

from __future__ import annotations

from held_run import port, run

__all__ = ["port", "run"]
