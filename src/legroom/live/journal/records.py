"""What the journal holds, as plain objects: incidents with their notes, and actions with their stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.records import dataclass

PLANNED, STARTED, DONE, FAILED, UNDONE = "planned", "started", "done", "failed", "undone"
UNFINISHED = (PLANNED, STARTED)
OUTCOMES = (DONE, FAILED, UNDONE)


class JournalUnavailable(LegroomError):
    """The journal cannot be read or written just now: a full disk, a lock, a file that is no journal.

    Whoever watches goes on watching and says so; whoever acts does not act, because nothing is done unrecorded.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, UNREACHABLE)


@dataclass(frozen=True)
class Note:
    """One thing that was seen, found or said while an incident was open."""

    time_s: float
    text: str
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class ActionStage:
    """How far an action had come. `name` is the platform's word for it ("drained", "stopped")."""

    time_s: float
    name: str
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """Something legroom did to the world, or was about to do. Recorded as `planned` before it is begun."""

    id: int
    incident_id: int | None
    group: str
    name: str
    state: str
    begun_s: float
    finished_s: float | None
    detail: Mapping[str, Any]
    stages: tuple[ActionStage, ...] = ()

    @property
    def unfinished(self) -> bool:
        """Whether nobody has said yet how it ended."""
        return self.state in UNFINISHED

    def stage(self, name: str) -> ActionStage | None:
        """The last stage of this name, if it got there."""
        return next((stage for stage in reversed(self.stages) if stage.name == name), None)


@dataclass(frozen=True)
class Incident:
    """A problem of one server from when it was noticed until it was over. `closed_s` is None while it lasts."""

    id: int
    server: str
    kind: str
    title: str
    opened_s: float
    closed_s: float | None
    outcome: str | None
    detail: Mapping[str, Any]
    notes: tuple[Note, ...] = ()
    actions: tuple[Action, ...] = ()
    key: str | None = None
    """What whoever opened it calls it."""
