"""Samples are kept one by one for a day, then as roll-ups of a minute and of ten minutes."""

import math
import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.live.journal import journal_records
from legroom.live.journal.journal import Journal, Retention
from legroom.live.journal.sample_store import FIELDS
from legroom.live.metrics.sample import EngineSample, Sample

START_S = 1_000_000 * 3600.0 / 1000  # a full hour
DAY_S = 86400


def row(**values):
    return tuple(values.get(name) for name in FIELDS)


def hours(count, server="a"):
    for at in range(count * 720):
        yield server, START_S + 5 * at, row(kv_use=(at % 7) / 7, running=at % 5, finished=at, preemptions=at)


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "journal.db") as opened:
        yield opened


def test_the_newest_samples_come_back_one_by_one(journal):
    journal.add_rows(("a", START_S + 5 * at, row(running=at, finished=10 * at)) for at in range(10))
    points = journal.samples("a", START_S, START_S + 100)
    assert [(point.running, point.running_max, point.finished) for point in points] == [
        (at, at, 10 * at) for at in range(10)
    ]
    assert journal.samples("b", START_S, START_S + 100) == ()


def test_a_sample_stores_sums_and_the_fullest_engine(journal):
    engines = (
        EngineSample("m", "0", kv_use=0.5, running=3, recomputed_tokens=10),
        EngineSample("m", "1", kv_use=0.7, running=2, recomputed_tokens=5),
    )
    journal.add_samples([Sample(START_S, "a", engines, process_start_s=12.0)])
    (point,) = journal.samples("a", START_S - 1, START_S + 1)
    assert (point.kv_use, point.running, point.waiting) == (0.7, 5.0, None)
    assert (point.recomputed_tokens, point.process_start_s) == (15.0, 12.0)


def test_values_that_are_not_finite_are_unknown(journal):
    journal.add_samples([Sample(START_S, "a", (EngineSample("m", "0", kv_use=math.inf, running=math.nan),))])
    (point,) = journal.samples("a", START_S - 1, START_S + 1)
    assert (point.kv_use, point.running, point.waiting) == (None, None, None)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 50)), min_size=1, max_size=200))
def test_a_roll_up_keeps_maxima_means_and_growth(seen):
    total, rows = 0, []
    for at, (use, more) in enumerate(seen):
        total += more
        rows.append(("a", START_S + at * 5.0, row(kv_use=use, preemptions=total)))
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        journal_records.create_tables(db)
        journal = Journal(db, None, lambda: START_S)
        journal.add_rows(rows)
        points = journal.samples("a", START_S, START_S + 1000, max_points=20)
    assert {point.span_s for point in points} == {60}
    uses = [use for use, _ in seen]
    assert max(point.kv_use_max for point in points) == max(uses)
    assert points[0].kv_use == pytest.approx(sum(uses[:12]) / len(uses[:12]))
    assert sum(point.preempted for point in points) == total - points[0].preemptions


def test_a_restart_counts_from_zero(journal):
    journal.add_rows(("a", START_S + 5 * at, row(preemptions=n)) for at, n in enumerate((5, 9, 2, None, 3)))
    assert [point.preempted for point in journal.samples("a", START_S, START_S + 60)] == [0, 4, 2, None, 1]


def test_a_long_query_is_answered_in_minutes_or_tens_of_minutes(journal):
    journal.add_rows(hours(3))
    journal.maintain(START_S + 2 * 3600 + 600)  # the last 50 minutes are not rolled up yet
    minutes = journal.samples("a", START_S, START_S + 3 * 3600 - 1, max_points=200)
    assert (len(minutes), {point.span_s for point in minutes}) == (180, {60})
    tens = journal.samples("a", START_S, START_S + 3 * 3600 - 1, max_points=20)
    assert (len(tens), {point.span_s for point in tens}) == (18, {600})
    assert all(point.kv_use_max == 6 / 7 for point in minutes)
    assert [point.finished for point in tens] == [120 * at + 119 for at in range(18)]


def test_what_is_past_its_retention_is_left_in_the_coarser_step(journal):
    journal.add_rows(hours(2))
    journal.maintain(START_S + 10 * 3600, Retention(raw_s=9 * 3600))
    points = journal.samples("a", START_S, START_S + 2 * 3600, max_points=10_000)
    assert {point.span_s for point in points if point.time_s < START_S + 3600} == {60}
    assert {point.span_s for point in points if point.time_s >= START_S + 3600} == {0}
    assert len(points) == 60 + 720
    journal.maintain(START_S + 10 * DAY_S)
    assert {point.span_s for point in journal.samples("a", START_S, START_S + 2 * 3600)} == {600}
    journal.maintain(START_S + 400 * DAY_S)
    assert journal.samples("a", START_S, START_S + 2 * 3600) == ()


def test_a_clock_that_was_set_back_loses_no_sample(journal):
    journal.add_rows(hours(1))
    journal.maintain(START_S + 2 * 3600)
    journal.add_rows(("a", START_S + 2.5 + 5 * at, row(running=100)) for at in range(3))
    journal.maintain(START_S + 2 * 3600)
    points = journal.samples("a", START_S, START_S + 3600, max_points=10_000)
    assert len(points) == 723
    assert max(point.running for point in points) == 100


def test_a_sample_from_the_future_does_not_stop_roll_ups(journal):
    journal.add_rows([("a", START_S + 40 * DAY_S, row(running=1))])
    journal.maintain(START_S + 41 * DAY_S)
    journal.add_rows(hours(1))
    journal.maintain(START_S + 2 * 3600)
    assert len(journal.samples("a", START_S, START_S + 3600, max_points=100)) == 60
