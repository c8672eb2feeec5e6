"""The samples of a journal: one SQL row each for a day, then roll-ups of a minute and of ten minutes."""

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from legroom.live.metrics.sample import Sample
from legroom.records import dataclass

GAUGES = ("kv_use", "running", "waiting")
COUNTERS = (
    *("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "recomputed_tokens"),
    "finished",
)
FIELDS = (*GAUGES, "memory_used_bytes", "num_blocks", "process_start_s", *COUNTERS)
MAXIMA = tuple(f"{name}_max" for name in GAUGES)
ROLLUP_STEPS_S = (60, 600)
_LATE_S = 120.0  # a scrape times out after 4 s, and the sidecar writes every few seconds
_USUAL_INTERVAL_S = 5.0  # `watch`'s default
_PREEMPTIONS = FIELDS.index("preemptions")

# A counter's maximum is its last total, unless the server restarted within the step: then growth appears one step late.
_ROLL_UP = (
    "SELECT server_id, :step_ms / 1000, time_ms / :step_ms * :step_ms AS start_ms, "
    + ", ".join(f"{'avg' if name in (*GAUGES, 'memory_used_bytes') else 'max'}({name})" for name in FIELDS)
    + ", "
    + ", ".join(f"max({name})" for name in GAUGES)
    + " FROM samples WHERE server_id = :server AND time_ms >= :since_ms AND time_ms < :until_ms GROUP BY start_ms"
)
SAMPLE_TABLES = f"""
    CREATE TABLE samples (server_id INTEGER NOT NULL, time_ms INTEGER NOT NULL,
        {", ".join(f"{name} REAL" for name in FIELDS)}, PRIMARY KEY (server_id, time_ms)) WITHOUT ROWID;
    CREATE TABLE rollups (server_id INTEGER NOT NULL, step_s INTEGER NOT NULL, time_ms INTEGER NOT NULL,
        {", ".join(f"{name} REAL" for name in (*FIELDS, *MAXIMA))},
        PRIMARY KEY (server_id, step_s, time_ms)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Retention:
    """How long each resolution is kept. Raw samples of a day show an incident in full; minutes of a week compare it
    with the same hour of other days; ten-minute roll-ups of a quarter show slow growth."""

    raw_s: float = 86400.0
    minute_s: float = 8 * 86400.0
    ten_minutes_s: float = 92 * 86400.0
    incidents_s: float = 366 * 86400.0


class JournalPoint(NamedTuple):
    """A sample (`span_s` is 0) or the roll-up of several. Gauges are means, counters totals. None: not reported."""

    time_s: float
    span_s: int
    kv_use: float | None = None
    running: float | None = None
    waiting: float | None = None
    memory_used_bytes: float | None = None
    num_blocks: float | None = None
    process_start_s: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    recomputed_tokens: float | None = None
    finished: float | None = None
    kv_use_max: float | None = None
    running_max: float | None = None
    waiting_max: float | None = None
    preempted: float | None = None
    """Preemptions since the point before."""


def stored_values(sample: Sample) -> tuple[float | None, ...]:
    """A sample's values in the order of FIELDS, summed over engines (KV use: the highest); None if not reported."""
    own = {
        "kv_use": sample.kv_use_max,
        "waiting": sample.waiting,
        "memory_used_bytes": sample.memory_used_bytes,
        "process_start_s": sample.process_start_s,
    }
    values = (own[name] if name in own else sample.total(name) for name in FIELDS)
    return tuple(value if value is not None and math.isfinite(value) else None for value in values)


class SampleStore:
    """Samples inside a journal's database. The caller holds the transaction; see `Journal`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._ids: dict[str, int] = {}

    def add(self, rows: Iterable[tuple[str, float, Sequence[float | None]]]) -> None:
        """Stores (server, Unix time, values) rows; a later one replaces that of the same server and millisecond."""
        marks = ", ".join("?" * (2 + len(FIELDS)))
        values = [(self._server_id(server), int(time_s * 1000), *values) for server, time_s, values in rows]
        self._db.executemany(f"INSERT OR REPLACE INTO samples VALUES ({marks})", values)

    def servers(self) -> dict[str, int]:
        """Server name -> row id, sorted by name."""
        return dict(self._db.execute("SELECT name, id FROM servers ORDER BY name"))

    def points(self, server: str, since_s: float, until_s: float, max_points: int) -> tuple[JournalPoint, ...]:
        """Points between two Unix times, with the finest step that gives at most `max_points` and is still kept."""
        server_id = self.servers().get(server)
        if server_id is None or until_s < since_s:
            return ()
        steps_s = (0, *ROLLUP_STEPS_S)
        fitting = (step_s for step_s in steps_s if (until_s - since_s) / (step_s or _USUAL_INTERVAL_S) <= max_points)
        finest_s = next(fitting, steps_s[-1])
        rows: list[Sequence[float | None]] = []
        end_ms = math.floor(until_s * 1000) + 1
        for step_s in steps_s[steps_s.index(finest_s) :]:
            rows = list(self._sample_rows(server_id, step_s, math.ceil(since_s * 1000), end_ms)) + rows
            end_ms = int(rows[0][1] or 0) - 1000 * step_s if rows else end_ms
        return tuple(_to_points(rows))

    def _sample_rows(self, server_id: int, step_s: int, since_ms: int, end_ms: int) -> Iterator[Sequence[float | None]]:
        """(Step in s, Unix time in ms, values...) rows: samples for step 0, else roll-ups, computed if not stored."""
        within = "WHERE server_id = ? AND time_ms >= ? AND time_ms < ?"
        span = (server_id, since_ms, end_ms)
        if step_s == 0:
            columns = f"0, time_ms, {', '.join((*FIELDS, *GAUGES))}"
            yield from self._db.execute(f"SELECT {columns} FROM samples {within} ORDER BY time_ms", span)
            return
        query = f"SELECT * FROM rollups {within} AND step_s = ? ORDER BY time_ms"
        stored = self._db.execute(query, (*span, step_s))
        next_ms = since_ms
        for row in stored:
            yield row[1:]
            next_ms = row[2] + 1000 * step_s
        spec = {"step_ms": 1000 * step_s, "server": server_id, "since_ms": next_ms, "until_ms": end_ms}
        yield from (row[1:] for row in self._db.execute(_ROLL_UP, spec))

    def roll_up(self, server_id: int, now_s: float) -> None:
        """Write the roll-ups (means, totals) of every minute and ten minutes that ended since the last call."""
        for step_s in ROLLUP_STEPS_S:
            last = "SELECT coalesce(max(time_ms), 0) FROM rollups WHERE server_id = ? AND step_s = ? AND time_ms <= ?"
            since_ms = self._db.execute(last, (server_id, step_s, int(now_s * 1000))).fetchone()[0]
            until_ms = int((now_s - _LATE_S) // step_s) * step_s * 1000
            spec = {"step_ms": 1000 * step_s, "server": server_id, "since_ms": since_ms, "until_ms": until_ms}
            self._db.execute(f"INSERT OR REPLACE INTO rollups {_ROLL_UP}", spec)

    def delete_old(self, server_id: int, now_s: float, retention: Retention) -> None:
        """Deletes samples and roll-ups that are older than their retention."""
        raw_ms = int((now_s - retention.raw_s) * 1000)
        self._db.execute("DELETE FROM samples WHERE server_id = ? AND time_ms < ?", (server_id, raw_ms))
        delete = "DELETE FROM rollups WHERE server_id = ? AND step_s = ? AND time_ms < ?"
        for step_s, kept_s in zip(ROLLUP_STEPS_S, (retention.minute_s, retention.ten_minutes_s), strict=True):
            self._db.execute(delete, (server_id, step_s, int((now_s - kept_s) * 1000)))

    def _server_id(self, server: str) -> int:
        """The row id of the server's name, inserted where it is new."""
        if server not in self._ids:
            self._db.execute("INSERT OR IGNORE INTO servers (name) VALUES (?)", (server,))
            # Not cached before `cache_ids`: the transaction may yet be rolled back.
            return int(self._db.execute("SELECT id FROM servers WHERE name = ?", (server,)).fetchone()[0])
        return self._ids[server]

    def cache_ids(self) -> None:
        """Keeps the row ids of new servers in memory; to be called once their insert is committed."""
        if len(self._ids) != self._db.execute("SELECT count(*) FROM servers").fetchone()[0]:
            self._ids = self.servers()


def _to_points(rows: Iterable[Sequence[float | None]]) -> Iterator[JournalPoint]:
    """(step, time in ms, values...) rows as points, each with the preemptions since the row before it."""
    before: float | None = None
    for step_s, time_ms, *values in rows:
        total = values[_PREEMPTIONS]
        grown = None
        if total is not None:
            grown = 0.0 if before is None else total - before if total >= before else total  # less: it restarted
            before = total
        yield JournalPoint._make(((time_ms or 0) / 1000, int(step_s or 0), *values, grown))
