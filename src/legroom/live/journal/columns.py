"""Samples as columns of numbers: what is kept of one, how an hour of them is packed, and how it is thinned.

An hour of one server is 720 samples of 17 numbers. Whole numbers are kept as differences, others with their bytes
sorted by significance, and the whole is compressed: a few bytes a number's change, nothing for what stands still.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import fsum, isnan

from legroom.records import dataclass

# Changing these takes a step of the tables (`records`) that rewrites what is held.
GAUGES = ("kv_use", "running", "waiting", "memory_used_bytes", "num_blocks", "process_start_s")
COUNTERS = (
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "recomputed_tokens",
    "finished",
    "e2e_latency_sum_s",
    "e2e_latency_count",
    "ttft_sum_s",
    "ttft_count",
)
FIELDS = GAUGES + COUNTERS
HOUR_S = 3600
RAW_STEP_S, MINUTE_STEP_S, TEN_MINUTES_STEP_S = 0, 60, 600

NAN = math.nan
Column = Sequence[float]
_CONSTANT, _INTEGERS, _DOUBLES = 0, 1, 2
_LARGEST_EXACT = 2.0**53
_MOST_ROWS = HOUR_S * 1000  # a sample has its millisecond


class DamagedColumns(ValueError):
    """Bytes that `pack_columns` did not write, or that were changed since."""


@dataclass(frozen=True, slots=True)
class JournalPoint:
    """A sample, or several made one: from `time_s` on for `span_s` seconds (0: one sample), `count` of them.

    Gauges have a least, a mean and a greatest value. Counters have their last total, and by how much they grew
    since the point before (restarts of the server taken out). What was not known is NaN.
    """

    time_s: float
    span_s: int
    count: int
    low: tuple[float, ...]
    mean: tuple[float, ...]
    high: tuple[float, ...]
    last: tuple[float, ...]
    growth: tuple[float, ...]

    def gauge(self, name: str) -> float | None:
        """The mean of a gauge."""
        return _known(self.mean[GAUGES.index(name)])

    def gauge_range(self, name: str) -> tuple[float, float] | None:
        at = GAUGES.index(name)
        return None if isnan(self.low[at]) else (self.low[at], self.high[at])

    def total(self, name: str) -> float | None:
        return _known(self.last[COUNTERS.index(name)])

    def growth_of(self, name: str) -> float | None:
        """By how much a counter grew since the point before."""
        return _known(self.growth[COUNTERS.index(name)])


def _known(value: float) -> float | None:
    return None if isnan(value) else value


@lru_cache(maxsize=8)
def _compressor() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes], type[Exception]]:
    import zstandard  # one command in many touches samples

    return zstandard.ZstdCompressor(level=6).compress, zstandard.ZstdDecompressor().decompress, zstandard.ZstdError


def pack_row(values: Sequence[float]) -> bytes:
    """One sample as it waits to be packed with its hour."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_row(packed: bytes) -> tuple[float, ...]:
    """One waiting sample."""
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def pack_columns(columns: Sequence[Column]) -> bytes:
    """Columns of equal length, compressed."""
    parts = [struct.pack("<HI", len(columns), len(columns[0]) if columns else 0)]
    for column in columns:
        parts.extend(_packed(column))
    return _compressor()[0](b"".join(parts))


def unpack_columns(packed: bytes) -> list[Column]:
    """What `pack_columns` was given. Raises `DamagedColumns`."""
    _, decompress, error_type = _compressor()
    try:
        plain = decompress(packed)
        count, length = struct.unpack_from("<HI", plain)
        if length > _MOST_ROWS:
            raise DamagedColumns(f"{length} rows in one hour")
        at, columns = 6, []
        for _ in range(count):
            column, at = _unpacked(plain, at, length)
            columns.append(column)
    except (error_type, struct.error, IndexError, ValueError, MemoryError) as error:  # a length may be damaged too
        raise DamagedColumns(str(error)) from error
    if at != len(plain):
        raise DamagedColumns(f"{len(plain)} bytes where {at} are expected")
    return columns


def _packed(column: Column) -> Iterable[bytes]:
    first = column[0]
    if all(value == first for value in column) or all(map(isnan, column)):
        return (struct.pack("<Bd", _CONSTANT, first),)
    if all(abs(value) < _LARGEST_EXACT and value == int(value) for value in column):  # false for NaN
        whole = [int(value) for value in column]
        steps = array("q", [whole[0], *(after - before for before, after in pairwise(whole))])
        return (bytes([_INTEGERS]), _by_significance(steps.tobytes()))
    return (bytes([_DOUBLES]), _by_significance(array("d", column).tobytes()))


def _unpacked(plain: bytes, at: int, length: int) -> tuple[Column, int]:
    kind = plain[at]
    at += 1
    if kind == _CONSTANT:
        return [struct.unpack_from("<d", plain, at)[0]] * length, at + 8
    values = _from_significance(plain[at : at + 8 * length])
    if kind == _DOUBLES:
        return array("d", values), at + 8 * length
    return list(accumulate(array("q", values))), at + 8 * length


def _by_significance(plain: bytes) -> bytes:
    return b"".join(plain[at::8] for at in range(8))


def _from_significance(sorted_bytes: bytes) -> bytes:
    plain, length = bytearray(len(sorted_bytes)), len(sorted_bytes) // 8
    for at in range(8):
        plain[at::8] = sorted_bytes[at * length : (at + 1) * length]
    return bytes(plain)


# Many samples made few: the least, mean and greatest of gauges, and the growth of counters across restarts.

Row = tuple[float, tuple[float, ...]]  # time_s, the values of FIELDS
_GAUGE_COUNT, _COUNTER_COUNT = len(GAUGES), len(COUNTERS)
POINT_COLUMNS = 2 + 3 * _GAUGE_COUNT + 2 * _COUNTER_COUNT


def growth(totals: Sequence[float]) -> float:
    """By how much a counter grew over these totals. A total that falls is a restart: it counts from zero again."""
    grown, before = 0.0, NAN
    for total in totals:
        if isnan(total):
            continue
        if not isnan(before):
            grown += total - before if total >= before else total
        before = total
    return NAN if isnan(before) else grown


def thinned(rows: Sequence[Row], step_s: int, before: Row | None = None) -> list[JournalPoint]:
    """One point for every `step_s` seconds in which there are rows. `before` is the row before the first."""
    points: list[JournalPoint] = []
    for start_s, bucket in _buckets(rows, step_s):
        columns = list(zip(*(values for _, values in bucket), strict=True))
        earlier = before[1] if before else (NAN,) * len(FIELDS)
        low, mean, high = zip(*(_spread(column) for column in columns[:_GAUGE_COUNT]), strict=True)
        counted = [
            (_last(column, earlier[at]), growth((earlier[at], *column)))
            for at, column in enumerate(columns[_GAUGE_COUNT:], start=_GAUGE_COUNT)
        ]
        last, grown = zip(*counted, strict=True)
        points.append(JournalPoint(start_s, step_s, len(bucket), low, mean, high, last, grown))
        before = (bucket[-1][0], (*bucket[-1][1][:_GAUGE_COUNT], *last))
    return points


def as_points(rows: Sequence[Row], before: Row | None = None) -> list[JournalPoint]:
    """Every row as a point of its own."""
    earlier = before[1] if before else (NAN,) * len(FIELDS)
    columns = list(zip(*(values for _, values in rows), strict=True))
    grown = [_growths(earlier[at], columns[at]) for at in range(_GAUGE_COUNT, len(columns))]
    return [
        JournalPoint(
            time_s,
            0,
            1,
            values[:_GAUGE_COUNT],
            values[:_GAUGE_COUNT],
            values[:_GAUGE_COUNT],
            values[_GAUGE_COUNT:],
            own,
        )
        for (time_s, values), own in zip(rows, zip(*grown, strict=True), strict=True)
    ]


def _growths(before: float, totals: Sequence[float]) -> list[float]:
    """The growth of a counter at each of its totals. Mostly all are known, which is quick to tell and to do."""
    if not isnan(sum(totals)):
        return [growth((before, totals[0])), *(b - a if b >= a else b for a, b in pairwise(totals))]
    growths = []
    for total in totals:
        growths.append(growth((before, total)) if not isnan(total) else NAN)
        before = before if isnan(total) else total
    return growths


def merged(points: Sequence[JournalPoint], step_s: int) -> list[JournalPoint]:
    """Points of a finer step made points of a coarser one."""
    made: list[JournalPoint] = []
    group: list[JournalPoint] = []
    for point in points:
        if group and _floor(point.time_s, step_s) != _floor(group[0].time_s, step_s):
            made.append(_merge(group, step_s))
            group = []
        group.append(point)
    if group:
        made.append(_merge(group, step_s))
    return made


def _merge(points: Sequence[JournalPoint], step_s: int) -> JournalPoint:
    count = sum(point.count for point in points)
    gauges = range(_GAUGE_COUNT)
    counters = range(_COUNTER_COUNT)
    return JournalPoint(
        _floor(points[0].time_s, step_s),
        step_s,
        count,
        tuple(_spread([point.low[at] for point in points])[0] for at in gauges),
        tuple(_weighted(points, at) for at in gauges),
        tuple(_spread([point.high[at] for point in points])[2] for at in gauges),
        tuple(_last([point.last[at] for point in points], NAN) for at in counters),
        tuple(_sum([point.growth[at] for point in points]) for at in counters),
    )


def _weighted(points: Sequence[JournalPoint], at: int) -> float:
    known = [(point.mean[at], point.count) for point in points if not isnan(point.mean[at])]
    weight = sum(count for _, count in known)
    return sum(mean * count for mean, count in known) / weight if weight else NAN


def columns_of(points: Sequence[JournalPoint]) -> list[Column]:
    """Thinned points as columns to pack."""
    rows = [(p.time_s, float(p.count), *p.low, *p.mean, *p.high, *p.last, *p.growth) for p in points]
    return [list(column) for column in zip(*rows, strict=True)]


def points_of(columns: Sequence[Column], step_s: int) -> list[JournalPoint]:
    """The points of packed columns."""
    g, c = _GAUGE_COUNT, _COUNTER_COUNT
    ends = (2, 2 + g, 2 + 2 * g, 2 + 3 * g, 2 + 3 * g + c, 2 + 3 * g + 2 * c)
    parts = [zip(*columns[start:end], strict=True) for start, end in pairwise(ends)]
    return [
        JournalPoint(time_s, step_s, int(count), *rest)
        for time_s, count, *rest in zip(columns[0], columns[1], *parts, strict=True)
    ]


def _buckets(rows: Sequence[Row], step_s: int) -> Iterator[tuple[float, list[Row]]]:
    bucket: list[Row] = []
    start_s = 0.0
    for row in rows:
        own_s = _floor(row[0], step_s)
        if bucket and own_s != start_s:
            yield start_s, bucket
            bucket = []
        start_s = own_s
        bucket.append(row)
    if bucket:
        yield start_s, bucket


def _floor(time_s: float, step_s: int) -> float:
    return float(time_s // step_s * step_s)


def _spread(column: Sequence[float]) -> tuple[float, float, float]:
    known = [value for value in column if not isnan(value)]
    return (min(known), sum(known) / len(known), max(known)) if known else (NAN, NAN, NAN)


def _last(column: Sequence[float], otherwise: float) -> float:
    return next((value for value in reversed(column) if not isnan(value)), otherwise)


def _sum(column: Sequence[float]) -> float:
    known = [value for value in column if not isnan(value)]
    return fsum(known) if known else NAN
