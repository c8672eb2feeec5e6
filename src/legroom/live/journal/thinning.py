"""Many samples made few: the least, mean and greatest of gauges, and the growth of counters across restarts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import fsum, isnan

from legroom.live.journal.columns import COUNTERS, FIELDS, GAUGES, NAN, Column, JournalPoint

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
        _floor(points[0].time_s, step_s), step_s, count,
        tuple(_spread([point.low[at] for point in points])[0] for at in gauges),
        tuple(_weighted(points, at) for at in gauges),
        tuple(_spread([point.high[at] for point in points])[2] for at in gauges),
        tuple(_last([point.last[at] for point in points], NAN) for at in counters),
        tuple(_sum([point.growth[at] for point in points]) for at in counters),
    )  # fmt: skip


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
