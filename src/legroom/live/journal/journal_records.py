"""What the journal holds: its tables, and the plain objects that are read from them.

The version of the tables is SQLite's `user_version`; a later legroom adds steps, never edits one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.journal.sample_store import SAMPLE_TABLES
from legroom.records import dataclass

# One step a version. Version 1 packed samples into blobs (`fine`, `packed`), which version 2 drops.
_STEPS = (
    """
    CREATE TABLE incidents (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, server TEXT NOT NULL, kind TEXT NOT NULL,
        title TEXT NOT NULL, detail TEXT NOT NULL, opened_s REAL NOT NULL, closed_s REAL, outcome TEXT);
    CREATE INDEX incidents_opened ON incidents (opened_s);
    CREATE INDEX incidents_server ON incidents (server, opened_s);
    CREATE TABLE notes (
        id INTEGER PRIMARY KEY AUTOINCREMENT, incident_id INTEGER NOT NULL, time_s REAL NOT NULL,
        text TEXT NOT NULL, detail TEXT NOT NULL);
    CREATE INDEX notes_incident ON notes (incident_id);
    CREATE TABLE actions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, incident_id INTEGER, "group" TEXT NOT NULL, name TEXT NOT NULL,
        state TEXT NOT NULL, begun_s REAL NOT NULL, finished_s REAL, detail TEXT NOT NULL);
    CREATE INDEX actions_incident ON actions (incident_id);
    CREATE INDEX actions_group ON actions ("group", begun_s);
    CREATE INDEX actions_state ON actions (state);
    CREATE TABLE stages (
        id INTEGER PRIMARY KEY AUTOINCREMENT, action_id INTEGER NOT NULL, time_s REAL NOT NULL,
        name TEXT NOT NULL, detail TEXT NOT NULL);
    CREATE INDEX stages_action ON stages (action_id);
    CREATE TABLE leases ("group" TEXT PRIMARY KEY, holder TEXT NOT NULL, until_s REAL NOT NULL);
    CREATE TABLE servers (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
    CREATE TABLE fine (
        server_id INTEGER NOT NULL, time_ms INTEGER NOT NULL, held BLOB NOT NULL,
        PRIMARY KEY (server_id, time_ms)) WITHOUT ROWID;
    CREATE TABLE packed (
        server_id INTEGER NOT NULL, step_s INTEGER NOT NULL, hour INTEGER NOT NULL, held BLOB NOT NULL,
        PRIMARY KEY (server_id, step_s, hour));
    CREATE INDEX packed_age ON packed (step_s, hour);
    """,
    f"DROP TABLE fine; DROP TABLE packed; {SAMPLE_TABLES}",
)
VERSION = len(_STEPS)


def version_of(db: sqlite3.Connection) -> int:
    """The version of the tables in this file; 0 for an empty one."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def bring_up_to_date(db: sqlite3.Connection) -> None:
    """Adds the tables that are missing, all in one transaction: a kill in between leaves the old version whole."""
    if version_of(db) >= VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for step in _STEPS[version_of(db) :]:  # read again: another process may have been quicker
            for statement in filter(str.strip, step.split(";")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


SQLITE_HEAD = b"SQLite format 3\0"
"""How every journal begins, once something was written."""
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
