"""Configs of which only some fields are set."""

from __future__ import annotations

import types


class Partial(types.SimpleNamespace):
    """A config of which only some fields matter: every other one is None."""

    def __getattr__(self, name: str) -> None:
        return None
