"""Samples stay exact for a day, then become minutes, then tens of minutes, and a query never notices."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.live.journal.columns import (
    COUNTERS,
    FIELDS,
    GAUGES,
    NAN,
    DamagedColumns,
    _compressor,
    growth,
    merged,
    pack_columns,
    pack_row,
    thinned,
    unpack_columns,
    unpack_row,
)
from legroom.live.journal.journal import Journal, Retention
from legroom.live.metrics.sample import EngineSample, Histogram, Sample

START_S = 1_000_000 * 3600.0 / 1000  # an hour's edge
NUMBERS = st.floats(allow_infinity=False)


def row(**values):
    return tuple(float(values.get(name, NAN)) for name in FIELDS)


def same(left, right):
    return len(left) == len(right) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True)
    )


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "journal.db") as opened:
        yield opened


@given(
    st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1, max_size=6))
)
def test_packed_columns_come_back_as_they_were(columns):
    back = unpack_columns(pack_columns(columns))
    assert len(back) == len(columns)
    assert all(same(a, b) for a, b in zip(columns, back, strict=True))


@given(st.lists(NUMBERS, max_size=30))
def test_a_packed_row_comes_back_as_it_was(values):
    assert same(values, unpack_row(pack_row(values)))


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=5), min_size=1, max_size=5))
def test_growth_of_a_counter_survives_restarts(runs):
    totals = [float(sum(run[: at + 1])) for run in runs for at in range(len(run))]
    grown = growth(totals)
    resets = sum(a > b for a, b in pairwise(totals))
    assert grown >= 0
    if not resets:
        assert grown == totals[-1] - totals[0]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 50)), min_size=1, max_size=200))
def test_thinning_keeps_extremes_means_and_growth(seen):
    total, rows = 0, []
    for at, (use, more) in enumerate(seen):
        total += more
        rows.append((at * 5.0, row(kv_use=use, preemptions=total)))
    points = thinned(rows, 60)
    uses = [use for use, _ in seen]
    assert min(point.gauge_range("kv_use")[0] for point in points) == min(uses)
    assert max(point.gauge_range("kv_use")[1] for point in points) == max(uses)
    assert sum(point.count for point in points) == len(seen)
    mean = sum(point.gauge("kv_use") * point.count for point in points) / len(seen)
    assert mean == pytest.approx(sum(uses) / len(uses))
    assert sum(point.growth_of("preemptions") for point in points) == total - seen[0][1]
    coarse = merged(points, 600)
    assert sum(point.growth_of("preemptions") for point in coarse) == total - seen[0][1]
    assert sum(point.count for point in coarse) == len(seen)


def test_what_was_never_seen_stays_unknown():
    point = thinned([(0.0, row(running=2)), (5.0, row(running=4))], 60)[0]
    assert (point.gauge("running"), point.gauge_range("running")) == (3.0, (2.0, 4.0))
    assert point.gauge("kv_use") is None
    assert point.gauge_range("kv_use") is None
    assert point.total("preemptions") is None
    assert point.growth_of("preemptions") is None


def test_the_newest_samples_come_back_one_by_one(journal):
    journal.add_rows(("a", START_S + 5 * at, row(running=at, finished=10 * at)) for at in range(10))
    points = journal.samples("a", START_S, START_S + 100)
    assert [point.gauge("running") for point in points] == list(range(10))
    assert [point.growth_of("finished") for point in points[1:]] == [10.0] * 9
    assert journal.samples("b", START_S, START_S + 100) == ()


def test_a_sample_gives_its_sums_its_fullest_pool_and_its_histograms(journal):
    latency = Histogram((1.0, math.inf), (3.0, 7.0), 2.5)
    engines = (
        EngineSample("m", "0", kv_use=0.5, running=3, recomputed_tokens=10, e2e_latency=latency),
        EngineSample("m", "1", kv_use=0.7, running=2, recomputed_tokens=5),
    )
    journal.add_samples([Sample(START_S, "a", engines, process_start_s=12.0)])
    (point,) = journal.samples("a", START_S - 1, START_S + 1)
    assert (point.gauge("kv_use"), point.gauge("running"), point.gauge("waiting")) == (0.7, 5.0, None)
    assert (point.total("e2e_latency_sum_s"), point.total("e2e_latency_count")) == (2.5, 7.0)
    assert (point.total("recomputed_tokens"), point.gauge("process_start_s")) == (15.0, 12.0)


def test_numbers_that_are_none_are_unknown(journal):
    journal.add_samples([Sample(START_S, "a", (EngineSample("m", "0", kv_use=math.inf, running=math.nan),))])
    (point,) = journal.samples("a", START_S - 1, START_S + 1)
    assert [point.gauge(name) for name in ("kv_use", "running", "waiting")] == [None, None, None]


def told(point):
    return point.time_s, point.count, point.gauge_range("running"), point.total("finished"), point.growth_of("finished")


def hours(count, server="a"):
    for at in range(count * 720):
        yield server, START_S + 5 * at, row(kv_use=(at % 7) / 7, running=at % 5, finished=at)


def test_hours_that_are_over_are_packed_and_read_the_same(journal):
    journal.add_rows(hours(3))
    before = journal.samples("a", START_S, START_S + 3 * 3600, max_points=10_000)
    journal.maintain(START_S + 3 * 3600 + 300)
    assert journal._db.execute("SELECT count(*) FROM fine").fetchone()[0] == 0
    after = journal.samples("a", START_S, START_S + 3 * 3600, max_points=10_000)
    assert [(p.time_s, p.gauge("kv_use"), p.total("finished")) for p in after] == [
        (p.time_s, p.gauge("kv_use"), p.total("finished")) for p in before
    ]


def test_a_long_question_is_answered_in_minutes_or_tens_of_minutes(journal):
    journal.add_rows(hours(3))
    journal.maintain(START_S + 2 * 3600 + 600)  # two hours packed, one still a row each
    minutes = journal.samples("a", START_S, START_S + 3 * 3600 - 1, max_points=200)
    assert (len(minutes), {point.span_s for point in minutes}) == (180, {60})
    tens = journal.samples("a", START_S, START_S + 3 * 3600 - 1, max_points=20)
    assert (len(tens), {point.span_s for point in tens}) == (18, {600})
    assert all(point.gauge_range("kv_use") == (0.0, 6 / 7) for point in minutes)


def test_what_is_too_old_for_its_resolution_is_left_in_the_next(journal):
    journal.add_rows(hours(2))
    journal.maintain(START_S + 10 * 3600, Retention(raw_s=9 * 3600))
    points = journal.samples("a", START_S, START_S + 2 * 3600, max_points=10_000)
    assert {point.span_s for point in points if point.time_s < START_S + 3600} == {60}
    assert {point.span_s for point in points if point.time_s >= START_S + 3600} == {0}
    assert len(points) == 60 + 720
    journal.maintain(START_S + 400 * 86400)
    assert journal.samples("a", START_S, START_S + 2 * 3600) == ()


def test_a_clock_that_was_set_back_loses_no_sample(journal):
    journal.add_rows(hours(1))
    journal.maintain(START_S + 2 * 3600)
    journal.add_rows(("a", START_S + 2.5 + 5 * at, row(running=100)) for at in range(3))
    journal.maintain(START_S + 2 * 3600)
    points = journal.samples("a", START_S, START_S + 3600, max_points=10_000)
    assert len(points) == 723
    assert max(point.gauge("running") for point in points) == 100


def test_a_clock_that_ran_ahead_leaves_nothing_unpacked(journal):
    journal.add_rows([("a", START_S + 40 * 86400, row(running=1))])
    journal.maintain(START_S)
    assert journal._db.execute("SELECT count(*) FROM fine").fetchone()[0] == 0


def test_a_day_that_is_over_becomes_one_piece_and_reads_the_same(journal):
    day_s = START_S // 86400 * 86400 + 86400
    journal.add_rows(("a", day_s + 60.0 * at, row(running=at % 7, finished=at)) for at in range(30 * 60))
    journal.maintain(day_s + 23 * 3600 + 3000)
    before = journal.samples("a", day_s, day_s + 23 * 3600 - 1, max_points=2000)
    journal.maintain(day_s + 30 * 3600)
    pieces = "SELECT count(*) FROM packed WHERE step_s = 60 AND hour < ?"
    assert journal._db.execute(pieces, (day_s // 3600 + 24,)).fetchone()[0] == 1
    after = journal.samples("a", day_s, day_s + 23 * 3600 - 1, max_points=2000)
    assert list(map(told, after)) == list(map(told, before))
    whole = journal.samples("a", day_s, day_s + 30 * 3600, max_points=10_000)
    assert [point.time_s for point in whole] == [day_s + 60.0 * at for at in range(30 * 60)]
    late = ("a", day_s + 30.0, row(running=50))
    journal.add_rows([late])
    journal.maintain(day_s + 30 * 3600)
    again = journal.samples("a", day_s, day_s + 24 * 3600 - 1, max_points=2000)
    assert len(again) == 24 * 60
    assert again[0].gauge_range("running") == (0.0, 50.0)


def test_a_kill_while_packing_leaves_the_hour_whole(journal, monkeypatch):
    journal.add_rows(hours(1))
    monkeypatch.setattr(type(journal._samples), "_hold", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        journal.maintain(START_S + 2 * 3600)
    assert len(journal.samples("a", START_S, START_S + 3600, max_points=10_000)) == 720


@given(st.binary(max_size=80), st.integers(0, 60), st.booleans())
def test_damaged_columns_are_known_as_such(noise, at, is_compressed):
    whole = pack_columns([[1.0, 2.0, 3.5], [7.0, 7.0, 7.0]])
    packed = noise if not is_compressed else _compressor()[0](noise)
    for bad in (packed, whole[:at] + noise + whole[at + 3 :]):
        try:
            columns = unpack_columns(bad)
        except DamagedColumns:
            continue
        assert len({len(column) for column in columns}) <= 1


ENDLESS = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little")  # a frame of zstd that claims an exbibyte


@pytest.mark.parametrize("damage", [b"\x00\x11\x22", pack_columns([[1.0]]), b"", ENDLESS])
def test_a_damaged_piece_costs_that_piece_alone(journal, damage):
    journal.add_rows(hours(3))
    journal.maintain(START_S + 3 * 3600 + 300)
    middle = int(START_S // 3600) + 1
    journal._db.execute("UPDATE packed SET held = ? WHERE hour = ?", (damage, middle))
    left = journal.samples("a", START_S, START_S + 3 * 3600, max_points=10_000)
    assert {int(point.time_s // 3600) for point in left} == {middle - 1, middle + 1}
    journal.add_rows([("a", START_S + 3600 + 7, row(running=1)), ("a", START_S + 2 * 3600 + 7, row(running=1))])
    journal.maintain(START_S + 2 * 86400)
    assert journal.samples("a", START_S, START_S + 3 * 3600, max_points=20)


def test_gauges_and_counters_are_apart():
    assert not set(GAUGES) & set(COUNTERS)
