"""The journal: incidents, actions, leases and samples in one SQLite file. WAL with a sync at every commit: a kill loses
nothing that a call returned for. Every method is one transaction. Threads may share an object, and processes a file."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legroom.files import store_path
from legroom.live.journal import journal_records as records
from legroom.live.journal.sample_store import JournalPoint, Retention, SampleStore, stored_values
from legroom.live.metrics.sample import Sample
from legroom.masking import masked

__all__ = ["Journal", "JournalPoint", "Retention", "journal_path"]

_ACTION_COLUMNS = 'id, incident_id, "group", name, state, begun_s, finished_s, detail'
_INCIDENT_COLUMNS = "id, server, kind, title, opened_s, closed_s, outcome, detail, key"
Detail = Mapping[str, Any]
"""Figures beside an entry, stored as JSON."""


def journal_path() -> Path:
    """The user's journal file, `$LEGROOM_HOME/journal.db`."""
    return store_path().with_name("journal.db")


class Journal:
    def __init__(self, db: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> None:
        self.path, self._db, self._clock = path, db, clock
        self._lock = threading.RLock()
        self._samples = SampleStore(db)

    @classmethod
    def open(cls, path: Path | None = None, *, busy_s: float = 5.0, clock: Callable[[], float] = time.time) -> Journal:
        """Opens or creates the journal at `path`, by default the user's. Raises `JournalUnavailable`."""
        path = path or journal_path()
        with _translated_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            except OSError as error:
                raise records.JournalUnavailable(f"the journal {path} cannot be written: {error.strerror}") from error
            db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
            try:
                if records.schema_version(db) == 0:
                    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                version = records.schema_version(db)
                if version not in (0, records.VERSION):
                    age = "a newer" if version > records.VERSION else "an older"
                    other = f"{age} legroom (version {version} of its tables)"
                    raise records.JournalUnavailable(
                        f"the journal {path} was written by {other}", "name another journal"
                    )
                records.create_tables(db)
            except BaseException:
                db.close()
                raise
        return cls(db, path, clock)

    def close(self) -> None:
        """Closes the database; a second call does nothing."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_incident(
        self, server: str, kind: str, title: str, detail: Detail, time_s: float | None = None, key: str | None = None
    ) -> int:
        """Opens an incident at `time_s` or now and returns its id; if there is one with this `key`, that one's id."""
        values = (key, server, kind, masked(title), _to_json_text(detail), self._given_or_now(time_s))
        columns = "key, server, kind, title, detail, opened_s"
        with self._write_transaction() as db:
            db.execute(f"INSERT OR IGNORE INTO incidents ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
            made = db.execute("SELECT changes()").fetchone()[0]
            query = "SELECT last_insert_rowid()" if made else "SELECT id FROM incidents WHERE key = ?"
            return int(db.execute(query, () if made else (key,)).fetchone()[0])

    def incident_id(self, key: str) -> int | None:
        """The id of the incident that was opened with this key; None where there is none."""
        with self._read_transaction() as db:
            row = db.execute("SELECT id FROM incidents WHERE key = ?", (key,)).fetchone()
        return None if row is None else int(row[0])

    def note(self, incident_id: int, text: str, detail: Detail | None = None, time_s: float | None = None) -> None:
        """Adds a note to an incident, with figures in `detail`, at `time_s` or now."""
        values = (incident_id, self._given_or_now(time_s), masked(text), _to_json_text(detail or {}))
        with self._write_transaction() as db:
            db.execute("INSERT INTO notes (incident_id, time_s, text, detail) VALUES (?, ?, ?, ?)", values)

    def close_incident(self, incident_id: int, outcome: str, time_s: float | None = None) -> None:
        """Closes an incident, unless it is closed, with one word for its `outcome`, at `time_s` or now."""
        update = "UPDATE incidents SET closed_s = ?, outcome = ? WHERE id = ? AND closed_s IS NULL"
        with self._write_transaction() as db:
            db.execute(update, (self._given_or_now(time_s), masked(outcome), incident_id))

    def incidents(
        self, since_s: float | None = None, server: str | None = None, limit: int | None = None, open_only: bool = False
    ) -> tuple[records.Incident, ...]:
        """Incidents of a server (None: of all) open at or after `since_s`, newest first, without notes and actions."""
        wanted = {
            "(closed_s IS NULL OR closed_s >= ?)": since_s,
            "server = ?": server,
            "closed_s IS NULL AND ?": open_only or None,
        }
        given = {condition: value for condition, value in wanted.items() if value is not None}
        where = " AND ".join(given) or "1"
        query = f"SELECT {_INCIDENT_COLUMNS} FROM incidents WHERE {where} ORDER BY opened_s DESC, id DESC LIMIT ?"
        with self._read_transaction() as db:
            rows = db.execute(query, (*given.values(), -1 if limit is None else limit)).fetchall()
        return tuple(_incident_of_row(row) for row in rows)

    def incident(self, incident_id: int) -> records.Incident | None:
        """The incident with its notes and actions; None where there is no such id."""
        with self._read_transaction() as db:
            row = db.execute(f"SELECT {_INCIDENT_COLUMNS} FROM incidents WHERE id = ?", (incident_id,)).fetchone()
            if row is None:
                return None
            select = "SELECT time_s, text, detail FROM notes WHERE incident_id = ? ORDER BY id"
            notes = tuple(
                records.Note(at_s, text, json.loads(more)) for at_s, text, more in db.execute(select, (incident_id,))
            )
            return _incident_of_row(row, notes, self._select_actions("incident_id = ?", (incident_id,)))

    def begin_action(self, incident_id: int | None, group: str, name: str, detail: Detail) -> int:
        """Records an action (`name`: `restart` ...) on a server `group` before it begins; returns the action's id."""
        values = (incident_id, group, name, records.PLANNED, self._given_or_now(None), _to_json_text(detail))
        columns = 'incident_id, "group", name, state, begun_s, detail'
        with self._write_transaction() as db:
            made = db.execute(f"INSERT INTO actions ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
            return int(made.lastrowid or 0)

    def reach_stage(self, action_id: int, stage: str, detail: Detail | None = None) -> None:
        """Records that an action reached a stage (such as `drained`); the first sets its state to `started`."""
        values = (action_id, self._given_or_now(None), stage, _to_json_text(detail or {}))
        with self._write_transaction() as db:
            db.execute(
                "UPDATE actions SET state = ? WHERE id = ? AND state = ?", (records.STARTED, action_id, records.PLANNED)
            )
            db.execute("INSERT INTO stages (action_id, time_s, name, detail) VALUES (?, ?, ?, ?)", values)

    def finish_action(self, action_id: int, outcome: str, detail: Detail | None = None) -> None:
        """Sets (or replaces) an action's outcome and adds to its `detail`; ValueError if it is not one of OUTCOMES."""
        if outcome not in records.OUTCOMES:
            raise ValueError(f"{outcome!r} is not one of {', '.join(records.OUTCOMES)}")
        update = "UPDATE actions SET state = ?, finished_s = ?, detail = ? WHERE id = ?"
        with self._write_transaction() as db:
            row = db.execute("SELECT detail FROM actions WHERE id = ?", (action_id,)).fetchone()
            merged = {**(json.loads(row[0]) if row else {}), **masked(dict(detail or {}))}
            db.execute(update, (outcome, self._given_or_now(None), json.dumps(merged), action_id))

    def unfinished_actions(self) -> tuple[records.Action, ...]:
        """Actions without an outcome: they are under way, or legroom was killed during them."""
        return self._select_actions("state IN (?, ?)", records.UNFINISHED)

    def actions(self, since_s: float = 0.0, group: str | None = None) -> tuple[records.Action, ...]:
        """Actions that began at or after `since_s`, of one group or (None) all, oldest first."""
        if group is None:
            return self._select_actions("begun_s >= ?", (since_s,))
        return self._select_actions('"group" = ? AND begun_s >= ?', (group, since_s))

    def action(self, action_id: int) -> records.Action | None:
        """The action with its stages; None where there is no such id."""
        return next(iter(self._select_actions("id = ?", (action_id,))), None)

    def _select_actions(self, where: str, values: Sequence[Any]) -> tuple[records.Action, ...]:
        """Actions that match the SQL condition `where` with bound `values`, each with its stages, by id."""
        query = f"SELECT {_ACTION_COLUMNS} FROM actions WHERE {where} ORDER BY id"
        stages = "SELECT time_s, name, detail FROM stages WHERE action_id = ? ORDER BY id"
        actions = []
        with self._read_transaction() as db:
            for row in db.execute(query, tuple(values)).fetchall():
                rows = db.execute(stages, row[:1])
                reached = tuple(records.ActionStage(at_s, name, json.loads(more)) for at_s, name, more in rows)
                actions.append(records.Action(*row[:-1], json.loads(row[-1]), reached))  # type: ignore[call-arg]
        return tuple(actions)

    def take_lease(self, group: str, holder: str, seconds: float) -> bool:
        """Takes a group's lease for `seconds`, or prolongs the holder's own; False while another holder has it."""
        now_s = self._given_or_now(None)
        with self._write_transaction() as db:
            db.execute(
                'INSERT INTO leases ("group", holder, until_s) VALUES (?, ?, ?) ON CONFLICT ("group") DO UPDATE SET '
                "holder = excluded.holder, until_s = excluded.until_s WHERE holder = excluded.holder OR until_s <= ?",
                (group, holder, now_s + seconds, now_s),
            )
            row = db.execute('SELECT holder FROM leases WHERE "group" = ?', (group,)).fetchone()
        return bool(row and row[0] == holder)

    def release_lease(self, group: str, holder: str) -> None:
        """Ends this holder's lease of a group; another holder's stays."""
        with self._write_transaction() as db:
            db.execute('DELETE FROM leases WHERE "group" = ? AND holder = ?', (group, holder))

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Stores samples in one transaction."""
        self.add_rows((sample.server, sample.time_s, stored_values(sample)) for sample in samples)

    def add_rows(self, rows: Iterable[tuple[str, float, Sequence[float | None]]]) -> None:
        """Stores rows of (server, Unix time, values in the order of `sample_store.FIELDS`)."""
        with self._write_transaction():
            self._samples.add(rows)
        self._samples.cache_ids()

    def samples(
        self, server: str, since_s: float, until_s: float | None = None, max_points: int = 3000
    ) -> tuple[JournalPoint, ...]:
        """A server's samples from `since_s` until `until_s` or now, rolled up where they exceed `max_points`."""
        with self._read_transaction():
            if records.schema_version(self._db) < records.VERSION:  # an old journal on a disk that cannot be written
                return ()
            return self._samples.points(server, since_s, self._given_or_now(until_s), max_points)

    def servers(self) -> tuple[str, ...]:
        """The names of all servers with samples."""
        with self._read_transaction():
            return tuple(self._samples.servers())

    def last_answers_s(self) -> dict[str, float]:
        """Server name -> the time of its last sample."""
        query = "SELECT name, (SELECT max(time_ms) FROM samples WHERE server_id = id) / 1000.0 FROM servers"
        with self._read_transaction() as db:
            return {name: last_s for name, last_s in db.execute(query) if last_s}

    def maintain(self, now_s: float | None = None, retention: Retention | None = None) -> None:
        """Rolls up samples and deletes samples, incidents and actions that are past their retention."""
        now_s, retention = self._given_or_now(now_s), retention or Retention()
        for server_id in self._samples.servers().values():
            with self._write_transaction():  # one transaction a server: a writer of incidents never waits long
                self._samples.roll_up(server_id, now_s)
                self._samples.delete_old(server_id, now_s, retention)
        with self._write_transaction() as db:
            ended_before = (now_s - retention.incidents_s,)
            for table, old in (
                ("notes", "incident_id IN (SELECT id FROM incidents WHERE closed_s < ?)"),
                ("stages", "action_id IN (SELECT id FROM actions WHERE finished_s < ?)"),
                ("actions", "finished_s < ?"),
                ("incidents", "closed_s < ?"),
            ):
                db.execute(f"DELETE FROM {table} WHERE {old}", ended_before)
        with _translated_errors(self.path), self._lock:
            self._db.execute("PRAGMA incremental_vacuum(2000)").fetchall()

    @contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """The locked connection in a write transaction: committed at the end, rolled back on an exception."""
        with _translated_errors(self.path), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite has rolled back by itself when the disk is full
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection]:
        """The locked connection for reads, with SQLite's errors translated; begins no SQL transaction."""
        with _translated_errors(self.path), self._lock:
            yield self._db

    def _given_or_now(self, given_s: float | None) -> float:
        return self._clock() if given_s is None else given_s


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Context manager: SQLite's errors become JournalUnavailable."""
    try:
        yield
    except sqlite3.Error as error:
        raise records.JournalUnavailable(*_error_and_hint(path, error)) from error


def is_damaged(error: BaseException | None) -> bool:
    """Whether the exception is SQLite's for a file that is no database or a damaged one."""
    return (getattr(error, "sqlite_errorname", None) or "").startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT"))


def _error_and_hint(path: Path, error: sqlite3.Error) -> tuple[str, str]:
    """(message, hint) for the user for an SQLite error."""
    name = getattr(error, "sqlite_errorname", None) or ""
    if name.startswith("SQLITE_FULL"):
        return f"the disk under the journal {path} is full", "make room; legroom goes on and writes when it can"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        if path.exists() and not path.stat().st_size:
            return f"the journal {path} was truncated while another process wrote it", "the sidecar begins a new one"
        return f"the journal {path} is locked by another process", "see what holds it open, such as a backup"
    if is_damaged(error):
        return f"{path} is not a journal, or is damaged: {error}", "move it away; legroom starts a new one"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"the journal {path} cannot be written: {error}", "check its permissions and its folder's"
    return f"the journal {path} failed: {error}", ""


def _incident_of_row(
    row: Sequence[Any], notes: tuple[records.Note, ...] = (), actions: tuple[records.Action, ...] = ()
) -> records.Incident:
    """The incident of a row in the column order of the incidents table's SELECT."""
    return records.Incident(*row[:7], json.loads(row[7]), notes, actions, row[8])  # type: ignore[call-arg]


def _to_json_text(detail: Detail) -> str:
    """The detail as JSON text, with secrets masked."""
    return json.dumps(masked(dict(detail)), default=str)
