"""The restart budget: so many an hour, each after a longer wait, and then no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legroom.actions.server_log import last_lines
from legroom.records import dataclass

LINES_SHOWN = 15


@dataclass(frozen=True)
class ServerExit:
    """How one start of the server ended."""

    code: int
    was_ready: bool
    timed_out: bool
    hung: bool
    lived_s: float

    @property
    def why(self) -> str:
        """Why a start counts as failed."""
        return "it did not become healthy" if self.timed_out else f"it ended with {self.code}"


def history_entry(what: str, ending: ServerExit, remedy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the history; `changed` is what was done, so it is filled in once it is."""
    diagnosed = {name: remedy.get(name) or None for name in ("failed", "cause", "entry", "refused")}
    return {"what": what, "exit_code": ending.code, "lived_s": ending.lived_s, "changed": None, **diagnosed}


def incident_detail(ending: ServerExit, remedy: Mapping[str, Any], command: str, log: Path) -> dict[str, Any]:
    diagnosed = {name: remedy[name] for name in ("cause", "entry", "evidence", "refused") if remedy.get(name)}
    lines = last_lines(log, LINES_SHOWN)
    return {"exit_code": ending.code, "lived_s": ending.lived_s, "command": command, "lines": lines, **diagnosed}


WINDOW_S = 3600.0
LONGEST_DELAY_S = 300.0
_MOST_DOUBLINGS = 64
"""By then the longest delay is reached from any first one; many more are no float."""


class RestartBudget:
    """Counts restarts after crashes. Never a loop: what crashes more often than the budget stays down."""

    def __init__(self, per_hour: int, first_delay_s: float) -> None:
        self.per_hour, self.first_delay_s = per_hour, first_delay_s
        self._taken: list[float] = []

    def left(self, now_s: float) -> int:
        """How many more the last hour allows."""
        self._taken = [taken for taken in self._taken if now_s - taken < WINDOW_S]
        return max(self.per_hour - len(self._taken), 0)

    def take(self, now_s: float) -> float | None:
        """How long to wait before the restart that is begun now; None where the budget is spent."""
        if not self.left(now_s):
            return None
        doublings = min(len(self._taken), _MOST_DOUBLINGS)
        delay_s = min(self.first_delay_s * 2.0**doublings, LONGEST_DELAY_S)
        self._taken.append(now_s)
        return delay_s
