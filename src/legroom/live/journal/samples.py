"""The samples of the journal: the newest a row each, older hours packed, thinned with age and at last forgotten."""

from __future__ import annotations

import math
import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from legroom.live.journal.columns import (
    FIELDS,
    HOUR_S,
    MINUTE_STEP_S,
    NAN,
    POINT_COLUMNS,
    RAW_STEP_S,
    TEN_MINUTES_STEP_S,
    Column,
    DamagedColumns,
    JournalPoint,
    Row,
    as_points,
    columns_of,
    merged,
    pack_columns,
    pack_row,
    points_of,
    thinned,
    unpack_columns,
    unpack_row,
)
from legroom.live.metrics.sample import Sample
from legroom.records import dataclass

STEPS_S = (RAW_STEP_S, MINUTE_STEP_S, TEN_MINUTES_STEP_S)
_LATE_S = 120.0  # a sample may arrive this late and still be packed with its hour
_SCRAPE_S = 5.0
_DAY_HOURS, _DAY_S = 24, 86400
_ROW_BYTES = 8 * len(FIELDS)
_TIME = attrgetter("time_s")


@dataclass(frozen=True)
class Retention:
    """How long each resolution is kept. A day of every sample shows an incident whole; a week of minutes compares
    it with the same hour of other days; a quarter of ten-minute points shows creep and growth."""

    raw_s: float = 86400.0
    minute_s: float = 8 * 86400.0
    ten_minutes_s: float = 92 * 86400.0
    incidents_s: float = 366 * 86400.0

    def of(self, step_s: int) -> float:
        """Seconds for which points of this step are kept."""
        return {RAW_STEP_S: self.raw_s, MINUTE_STEP_S: self.minute_s, TEN_MINUTES_STEP_S: self.ten_minutes_s}[step_s]


def values_of(sample: Sample) -> tuple[float, ...]:
    """What is kept of a sample: its sums over engines and models, and the fullest pool, in the order of FIELDS."""
    return tuple(_number(_field(sample, name)) for name in FIELDS)


def _field(sample: Sample, name: str) -> Any:
    for part, attribute in (("_sum_s", "sum"), ("_count", "count")):
        if name.endswith(part):
            histograms = [getattr(engine, name.removesuffix(part)) for engine in sample.engines]
            return _sum([getattr(histogram, attribute) for histogram in histograms if histogram is not None])
    if name == "kv_use":
        return sample.kv_use_max  # a full engine beside an idle one is the one that suffers
    if hasattr(sample, name):
        return getattr(sample, name)
    return _sum([value for engine in sample.engines if (value := getattr(engine, name)) is not None])


def _sum(values: Sequence[float]) -> float | None:
    return sum(values) if values else None


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return NAN
    return number if math.isfinite(number) else NAN


class SampleStore:
    """Samples inside a journal's database. The caller holds the transaction; see `Journal`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._ids: dict[str, int] = {}

    def add(self, rows: Iterable[tuple[str, float, Sequence[float]]]) -> None:
        """Server, time and values of each. The same server and millisecond again replaces what was there."""
        packed_rows = [(self._id(server), int(time_s * 1000), pack_row(values)) for server, time_s, values in rows]
        self._db.executemany("INSERT OR REPLACE INTO fine VALUES (?, ?, ?)", packed_rows)

    def servers(self) -> tuple[str, ...]:
        """Every server that has samples."""
        return tuple(name for (name,) in self._db.execute("SELECT name FROM servers ORDER BY name"))

    def points(self, server: str, since_s: float, until_s: float, max_points: int) -> tuple[JournalPoint, ...]:
        """Points between two times, at the finest step that stays within `max_points` and is still kept."""
        known = self._db.execute("SELECT id FROM servers WHERE name = ?", (server,)).fetchone()
        if known is None or until_s < since_s:
            return ()
        wanted_s = next(
            (step for step in STEPS_S if (until_s - since_s) / (step or _SCRAPE_S) <= max_points), STEPS_S[-1]
        )
        points = [*self._packed_points(known[0], since_s, until_s, wanted_s)]
        fine = self._fine_rows(known[0], since_s, until_s)
        points += as_points(fine) if wanted_s == RAW_STEP_S else thinned(fine, wanted_s)
        points.sort(key=_TIME)
        return tuple(points[bisect_left(points, since_s, key=_TIME) : bisect_right(points, until_s, key=_TIME)])

    def _packed_points(self, server_id: int, since_s: float, until_s: float, wanted_s: int) -> list[JournalPoint]:
        """Of each hour the step that was asked for, or the next coarser one that is left of it."""
        rows = self._db.execute(
            "SELECT hour, step_s, held FROM packed WHERE server_id = ? AND step_s >= ? AND hour BETWEEN ? AND ? "
            "ORDER BY step_s",
            (server_id, wanted_s, int(since_s // _DAY_S) * _DAY_HOURS, int(until_s // HOUR_S)),
        )
        kept: list[JournalPoint] = []
        fine_hours: set[int] = set()
        coarse_keys: set[int] = set()
        for hour, step_s, blob in rows:
            columns = _read(blob, step_s)
            if columns is None:
                continue
            if step_s == RAW_STEP_S:
                fine_hours.add(hour)
                kept += as_points(_rows_of(columns))
            elif hour not in coarse_keys:  # minutes and tens of minutes cover the same hours
                coarse_keys.add(hour)
                points = points_of(columns, step_s)
                kept += [p for p in points if int(p.time_s // HOUR_S) not in fine_hours] if fine_hours else points
        return kept

    def pack(self, now_s: float, at_most: int | None = None) -> int:
        """Packs hours that are over. Says how many; fewer than `at_most` means that none is left.

        An hour that lies ahead is over too: the clock was wrong when it was written, or is now.
        """
        current = int((now_s - _LATE_S) // HOUR_S)
        rows = self._db.execute(
            "SELECT DISTINCT server_id, time_ms / 3600000 AS hour FROM fine WHERE hour < ? OR hour > ? LIMIT ?",
            (current, int(now_s // HOUR_S) + 1, -1 if at_most is None else at_most),
        ).fetchall()
        for server_id, hour in rows:
            self._pack_hour(server_id, hour)
        return len(rows)

    def _pack_hour(self, server_id: int, hour: int) -> None:
        start_s, end_s = hour * HOUR_S, (hour + 1) * HOUR_S
        rows = self._fine_rows(server_id, start_s, end_s - 0.001)
        packed_before = self._packed_hour(server_id, RAW_STEP_S, hour)
        if packed_before is not None:  # the hour came again: a clock that was set back
            rows = sorted({row[0]: row for row in (*_rows_of(packed_before), *rows)}.values())
        self._hold(server_id, RAW_STEP_S, hour, _columns_of_rows(rows))
        minutes = thinned(rows, MINUTE_STEP_S, self._row_before(server_id, hour))
        earlier = self._packed_hour(server_id, MINUTE_STEP_S, hour)  # this hour again, or a day that begins with it
        if earlier is not None:
            kept = [
                point
                for point in points_of(earlier, MINUTE_STEP_S)
                if packed_before is None or not start_s <= point.time_s < end_s
            ]
            minutes = merged(sorted([*kept, *minutes], key=lambda point: point.time_s), MINUTE_STEP_S)
        self._hold(server_id, MINUTE_STEP_S, hour, columns_of(minutes))
        self._hold(server_id, TEN_MINUTES_STEP_S, hour, columns_of(merged(minutes, TEN_MINUTES_STEP_S)))
        self._db.execute(
            "DELETE FROM fine WHERE server_id = ? AND time_ms >= ? AND time_ms < ?",
            (server_id, start_s * 1000, end_s * 1000),
        )

    def pack_days(self, now_s: float, at_most: int) -> int:
        """Makes the minutes, and the tens of minutes, of a day that is over one piece each: few are quick to read."""
        today = int((now_s - _LATE_S) // _DAY_S)
        days = self._db.execute(
            "SELECT server_id, step_s, hour / 24 AS day FROM packed WHERE step_s > 0 AND hour < ? "
            "GROUP BY 1, 2, 3 HAVING count(*) > 1 LIMIT ?",
            (today * _DAY_HOURS, at_most),
        ).fetchall()
        for server_id, step_s, day in days:
            where = (server_id, step_s, day * _DAY_HOURS, (day + 1) * _DAY_HOURS)
            rows = self._db.execute(
                "SELECT held FROM packed WHERE server_id = ? AND step_s = ? AND hour >= ? AND hour < ?", where
            ).fetchall()
            pieces = [columns for (blob,) in rows if (columns := _read(blob, step_s)) is not None]
            points = [point for columns in pieces for point in points_of(columns, step_s)]
            self._db.execute("DELETE FROM packed WHERE server_id = ? AND step_s = ? AND hour >= ? AND hour < ?", where)
            points.sort(key=lambda point: point.time_s)
            if points:
                self._hold(server_id, step_s, day * _DAY_HOURS, columns_of(points))
        return len(days)

    def forget(self, now_s: float, retention: Retention) -> None:
        """Deletes what is older than its resolution is kept."""
        for step_s in STEPS_S:
            oldest = int((now_s - retention.of(step_s)) // HOUR_S)
            self._db.execute("DELETE FROM packed WHERE step_s = ? AND hour < ?", (step_s, oldest))

    def _fine_rows(self, server_id: int, since_s: float, until_s: float) -> list[Row]:
        rows = self._db.execute(
            "SELECT time_ms, held FROM fine WHERE server_id = ? AND time_ms BETWEEN ? AND ? ORDER BY time_ms",
            (server_id, math.floor(since_s * 1000), math.ceil(until_s * 1000)),
        )
        return [(time_ms / 1000, unpack_row(blob)) for time_ms, blob in rows if len(blob) == _ROW_BYTES]

    def _row_before(self, server_id: int, hour: int) -> Row | None:
        """The last sample of the hour before, so that growth across the hour's edge is counted."""
        columns = self._packed_hour(server_id, RAW_STEP_S, hour - 1)
        return _rows_of([column[-1:] for column in columns])[0] if columns else None

    def _packed_hour(self, server_id: int, step_s: int, hour: int) -> list[Column] | None:
        row = self._db.execute(
            "SELECT held FROM packed WHERE server_id = ? AND step_s = ? AND hour = ?", (server_id, step_s, hour)
        ).fetchone()
        return None if row is None else _read(row[0], step_s)

    def _hold(self, server_id: int, step_s: int, hour: int, columns: Sequence[Column]) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO packed VALUES (?, ?, ?, ?)", (server_id, step_s, hour, pack_columns(columns))
        )

    def _id(self, server: str) -> int:
        if server not in self._ids:
            self._db.execute("INSERT OR IGNORE INTO servers (name) VALUES (?)", (server,))
            # Not remembered until it is certain to be there: the transaction may yet be rolled back.
            return int(self._db.execute("SELECT id FROM servers WHERE name = ?", (server,)).fetchone()[0])
        return self._ids[server]

    def remember_ids(self) -> None:
        """Called once a transaction is in the file."""
        if len(self._ids) != self._db.execute("SELECT count(*) FROM servers").fetchone()[0]:
            self._ids = dict(self._db.execute("SELECT name, id FROM servers"))


def _read(blob: bytes, step_s: int) -> list[Column] | None:
    """A piece; None for a damaged one, which is left out: the rest of the journal is worth as much without it."""
    try:
        columns = unpack_columns(blob)
    except DamagedColumns:
        return None
    return columns if len(columns) == (1 + len(FIELDS) if step_s == RAW_STEP_S else POINT_COLUMNS) else None


def _columns_of_rows(rows: Sequence[Row]) -> list[Column]:
    columns = [list(column) for column in zip(*(values for _, values in rows), strict=True)]
    return [[round(time_s * 1000) for time_s, _ in rows], *columns]


def _rows_of(columns: Sequence[Column]) -> list[Row]:
    return [(row[0] / 1000, row[1:]) for row in zip(*columns, strict=True)]
