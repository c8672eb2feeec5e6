"""The tables of the journal. Their version is SQLite's `user_version`; a later legroom adds steps, never edits one."""

from __future__ import annotations

import sqlite3

# One step a version. `fine` holds the newest samples a row each; `packed` an hour of one server at one resolution.
STEPS = (
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
)
VERSION = len(STEPS)


def version_of(db: sqlite3.Connection) -> int:
    """The version of the tables in this file; 0 for an empty one."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def bring_up_to_date(db: sqlite3.Connection) -> None:
    """Adds the tables that are missing, all in one transaction: a kill in between leaves the old version whole."""
    if version_of(db) >= VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for step in STEPS[version_of(db) :]:  # read again: another process may have been quicker
            for statement in filter(str.strip, step.split(";")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
