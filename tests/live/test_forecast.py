"""Trends and forecasts: robust, with a band, and silent where there is no trend."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.live.forecast import pool_forecast, trend
from legroom.live.metrics.sample import EngineSample, Sample
from legroom.live.metrics.window import Window


def window(uses: list[float]) -> Window:
    made = Window("x")
    for number, use in enumerate(uses):
        made.add(Sample(5.0 * number, "x", (EngineSample("m", "0", kv_use=use, running=1.0),)))
    return made


def test_a_steady_rise_says_when_the_pool_is_full() -> None:
    ahead = pool_forecast(window([0.3 + 0.005 * number for number in range(40)]))
    assert ahead is not None
    # 0.455 are left at a thousandth a second.
    assert ahead.full_in_s == pytest.approx(455, rel=0.02)
    assert ahead.text == "pool full in ~8 min at this trend"
    assert ahead.per_minute == pytest.approx(0.06)


@pytest.mark.parametrize("interval_s", [5.0, 15.0, 30.5, 60.0, 300.0])
def test_a_slow_watcher_gets_a_forecast_too(interval_s: float) -> None:
    made = Window("x")
    for number in range(14):
        made.add(Sample(interval_s * number, "x", (EngineSample("m", "0", kv_use=0.5 + 0.01 * number, running=1.0),)))
    ahead = pool_forecast(made)
    assert (ahead is not None) == (0.32 / (0.01 / interval_s) <= 3600)


def test_a_noisy_rise_has_a_band_around_the_truth() -> None:
    chance = random.Random(1)
    ahead = pool_forecast(window([0.2 + 0.006 * number + chance.uniform(-0.05, 0.05) for number in range(60)]))
    assert ahead is not None and ahead.latest_s is not None
    assert ahead.earliest_s < (0.95 - 0.2 - 0.006 * 59) / 0.0012 < ahead.latest_s


@pytest.mark.parametrize(
    "uses",
    [[0.5] * 60, [0.9 - 0.01 * number for number in range(60)], [0.5 + 0.3 * (number % 2) for number in range(60)]],
)
def test_without_a_rise_there_is_no_forecast(uses: list[float]) -> None:
    assert pool_forecast(window(uses)) is None


def test_a_pool_that_is_full_needs_no_forecast() -> None:
    assert pool_forecast(window([0.5 + 0.01 * number for number in range(50)])) is None


def test_a_few_samples_are_no_trend() -> None:
    assert pool_forecast(window([0.1 * number for number in range(8)])) is None


def test_hours_ahead_nothing_is_promised() -> None:
    assert pool_forecast(window([0.3 + 0.0001 * number for number in range(60)])) is None


def test_outliers_do_not_bend_the_slope() -> None:
    points = [(float(n), 2.0 * n) for n in range(50)]
    points[10] = (10.0, 9999.0)
    points[40] = (40.0, -9999.0)
    line = trend(points)
    assert line is not None and line.slope == pytest.approx(2.0) and line.low > 0


@given(st.floats(-1e6, 1e6), st.floats(-1e3, 1e3), st.integers(3, 300))
def test_a_line_gives_its_own_slope(start: float, slope: float, count: int) -> None:
    line = trend([(float(n), start + slope * n) for n in range(count)])
    assert line is not None
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert line.low <= line.slope <= line.high


def test_points_next_to_no_time_apart_have_no_slope() -> None:
    assert trend([(0.0, 0.0), (5e-324, 1.0), (1e-323, 2.0)]) is None


@given(st.lists(st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True)), max_size=20))
def test_no_points_make_it_fail(points: list[tuple[float, float]]) -> None:
    trend(points)
