"""How one life of a server ended, and what of it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legroom.actions.kept_log import last_lines
from legroom.records import dataclass

LINES_SHOWN = 15


@dataclass(frozen=True)
class Ending:
    """How one life of the server ended."""

    code: int
    was_ready: bool
    timed_out: bool
    hung: bool
    lived_s: float

    @property
    def why(self) -> str:
        """Why a start counts as failed."""
        return "it did not become healthy" if self.timed_out else f"it ended with {self.code}"


def remembered(what: str, ending: Ending, remedy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the history; `changed` is what was done, so it is filled in once it is."""
    found = {name: remedy.get(name) or None for name in ("failed", "cause", "entry", "refused")}
    return {"what": what, "exit_code": ending.code, "lived_s": ending.lived_s, "changed": None, **found}


def journalled(ending: Ending, remedy: Mapping[str, Any], command: str, log: Path) -> dict[str, Any]:
    """What the journal keeps of it."""
    found = {name: remedy[name] for name in ("cause", "entry", "evidence", "refused") if remedy.get(name)}
    lines = last_lines(log, LINES_SHOWN)
    return {"exit_code": ending.code, "lived_s": ending.lived_s, "command": command, "lines": lines, **found}
