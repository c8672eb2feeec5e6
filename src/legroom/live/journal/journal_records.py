"""The journal's tables and records. `user_version` is the schema version."""

import sqlite3
from collections.abc import Mapping
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.journal.sample_store import SAMPLE_TABLES
from legroom.records import dataclass

VERSION = 2
_TABLES = f"""
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
    {SAMPLE_TABLES}"""


def schema_version(db: sqlite3.Connection) -> int:
    """The schema version; 0 for an empty file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def create_tables(db: sqlite3.Connection) -> None:
    """Make the journal's tables in an empty file, in one transaction."""
    if schema_version(db):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if not schema_version(db):  # read again: another process may have been quicker
            for statement in filter(str.strip, _TABLES.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


SQLITE_HEAD = b"SQLite format 3\0"
"""The first bytes of every SQLite file."""
PLANNED, STARTED, DONE, FAILED, UNDONE = "planned", "started", "done", "failed", "undone"
UNFINISHED = (PLANNED, STARTED)
OUTCOMES = (DONE, FAILED, UNDONE)


class JournalUnavailable(LegroomError):
    """The journal cannot be read or written: a full disk, a lock, not a journal."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, UNREACHABLE)


@dataclass(frozen=True)
class Note:
    time_s: float
    text: str
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class ActionStage:
    time_s: float
    name: str
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Action:
    """A restart, drain or other change. Recorded as `planned` before it begins."""

    id: int
    incident_id: int | None
    group: str
    name: str
    state: str
    begun_s: float
    finished_s: float | None
    detail: Mapping[str, Any]
    stages: tuple[ActionStage, ...] = ()

    def stage(self, name: str) -> ActionStage | None:
        """The last stage of this name that the action reached; None where it did not."""
        return next((stage for stage in reversed(self.stages) if stage.name == name), None)


@dataclass(frozen=True)
class Incident:
    """A problem of one server. `closed_s` is None while it is open."""

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
    """An identifier that the writer chose."""

    def to_json(self) -> dict[str, Any]:
        """The entry of `legroom incidents --json` and the sidecar's `/incidents`, without notes and actions."""
        return {name: value for name, value in vars(self).items() if name not in ("notes", "actions", "key")}
