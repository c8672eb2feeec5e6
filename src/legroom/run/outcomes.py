"""`legroom run` sees for itself whether a fix worked: it is the one that starts the server again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from legroom.errors import LegroomError


class TriedFix:
    """The fix that is being tried, until the server is up or fails again. Recording it never stops a server."""

    def __init__(self, release: str, say: Callable[[str], None]) -> None:
        self._release, self._say = release, say
        self._remedy: Mapping[str, Any] | None = None

    def begin(self, remedy: Mapping[str, Any]) -> None:
        self._remedy = remedy if remedy.get("cause") and remedy.get("fix") else None

    def end(self, worked: bool) -> None:
        remedy, self._remedy = self._remedy, None
        if remedy is None:
            return
        from legroom.explain.outcomes import Outcome, record_outcome  # noqa: PLC0415 - only after a fix

        outcome = Outcome(remedy["cause"], remedy["entry"], remedy["fix"], self._release, worked, "run")
        try:
            record_outcome(outcome)
        except LegroomError as error:
            self._say(f"{error.message}; going on without")
