"""Steps between samples: resets, gaps, clock jumps, releases that change, engines that come and go."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from legroom.live.detectors import Watcher
from legroom.live.metrics.sample import EngineSample, Histogram, Sample, ScrapeFailure
from legroom.live.metrics.window import Window
from legroom.live.thresholds import DEFAULT

SERVER = "http://host:8000"


def sample(time_s: float, *engines: EngineSample, **fields: float) -> Sample:
    return Sample(time_s, SERVER, engines or (EngineSample("m", "0", **fields),))  # type: ignore[arg-type]


def window(*samples: Sample | ScrapeFailure) -> Window:
    made = Window(SERVER)
    for look in samples:
        made.add(look)
    return made


def test_a_rate_is_growth_over_time() -> None:
    seen = window(sample(0, generation_tokens=100), sample(5, generation_tokens=150), sample(10, generation_tokens=250))
    assert seen.rate("generation_tokens") == pytest.approx(15)
    assert seen.interval_s == 5


def test_a_snapshot_stays_as_it_is_when_the_next_look_comes_in() -> None:
    seen = window(sample(0, generation_tokens=100), sample(5, generation_tokens=150))
    snapshot = seen.snapshot()
    before = {name: list(kept) for name, kept in vars(snapshot).items() if isinstance(kept, deque)}
    seen.add(sample(10, generation_tokens=1))
    seen.add(ScrapeFailure(15, SERVER, "refused", "nothing listens there"))
    seen.switches.append(20.0)
    assert {name: list(getattr(snapshot, name)) for name in before} == before


def test_a_total_that_fell_counts_from_nothing() -> None:
    seen = window(sample(0, generation_tokens=1000, preemptions=7), sample(5, generation_tokens=50, preemptions=8))
    step = seen.steps[-1]
    assert step.restarted
    assert (step.total("generation_tokens"), step.total("preemptions")) == (50, 8)
    assert list(seen.restarts) == [5]


def test_a_new_start_time_is_a_restart_though_totals_grew() -> None:
    old, new = (
        Sample(t, SERVER, (EngineSample("m", "0", generation_tokens=g),), process_start_s=s)
        for t, g, s in ((0.0, 5.0, -100.0), (30.0, 500.0, 10.0))
    )
    assert list(window(old, new).restarts) == [30]


def test_a_clock_that_goes_back_makes_no_rate_and_forgets_what_came_before() -> None:
    seen = window(sample(100, generation_tokens=0), sample(105, generation_tokens=50), sample(50, generation_tokens=60))
    assert seen.rate("generation_tokens") is None
    assert not seen.steps
    seen.add(sample(55, generation_tokens=110))
    assert seen.rate("generation_tokens") == pytest.approx(10)


def test_a_leap_forward_makes_no_rate() -> None:
    seen = window(sample(0, generation_tokens=0), sample(5, generation_tokens=50), sample(4000, generation_tokens=60))
    assert seen.rate("generation_tokens") is None


def test_looks_a_minute_or_two_apart_make_steps_too() -> None:
    seen = window(*(sample(100.0 * number, generation_tokens=1000.0 * number) for number in range(5)))
    assert len(seen.steps) == 4 and seen.rate("generation_tokens", 1000) == pytest.approx(10)


def test_an_outage_is_no_interval_but_the_last_sample_is_kept() -> None:
    failures = [ScrapeFailure(5.0 * n, SERVER, "refused", "no") for n in range(1, 20)]
    seen = window(sample(0, generation_tokens=5, running=3), *failures)
    assert seen.latest is not None and seen.latest.running == 3
    assert len(seen.failures) == 19 and not seen.is_answering
    seen.add(sample(100, generation_tokens=3))
    assert seen.is_answering and not seen.steps and list(seen.restarts) == [100]


def test_an_engine_that_appears_has_no_step_until_its_second_sample() -> None:
    first, two = EngineSample("m", "0", generation_tokens=5), EngineSample("m", "1", generation_tokens=900)
    seen = window(sample(0, first), sample(5, first, two))
    assert [engine.key for engine in seen.steps[-1].engines] == [("m", "0")]


def test_a_server_that_changes_its_release_goes_on_without_a_false_rate() -> None:
    v0 = EngineSample("m", "", generation_tokens=5000, kv_use=0.5)
    v1 = EngineSample("m", "0", generation_tokens=10, kv_use=0.1)
    seen = window(sample(0, v0), sample(5, v1), sample(10, EngineSample("m", "0", generation_tokens=30)))
    assert seen.rate("generation_tokens") == pytest.approx(4)


def test_what_is_not_shown_stays_unknown() -> None:
    seen = window(sample(0, running=1), sample(5, running=1))
    assert seen.rate("preemptions") is None and seen.increase("finished", 60) is None
    assert seen.hit_rate() is None


def test_the_hit_rate_comes_from_the_counters() -> None:
    seen = window(sample(0, prefix_queries=0, prefix_hits=0), sample(5, prefix_queries=200, prefix_hits=50))
    assert seen.hit_rate() == pytest.approx(0.25)


def test_v0_shows_its_hit_rate_as_a_gauge() -> None:
    seen = window(sample(0, prefix_hit_rate=0.4), sample(5, prefix_hit_rate=0.4))
    assert seen.hit_rate() == pytest.approx(0.4)


def test_latency_is_of_what_was_observed_in_the_window_alone() -> None:
    bounds = (1.0, 2.0, float("inf"))
    old, new = Histogram(bounds, (100, 100, 100), 50.0), Histogram(bounds, (100, 110, 110), 65.0)
    seen = window(sample(0, EngineSample("m", "0", ttft=old)), sample(5, EngineSample("m", "0", ttft=new)))
    assert seen.quantiles("ttft", (0.5,)) == [pytest.approx(1.5)]


def test_memory_is_kept_thin_for_days() -> None:
    seen = Window(SERVER)
    for number in range(2000):
        seen.add(Sample(5.0 * number, SERVER, (EngineSample("m", "0"),), memory_used_bytes=number))
    assert len(seen.points) == 34


def test_steps_are_kept_for_as_long_as_anyone_looks_back() -> None:
    for interval_s, kept in ((5.0, 120), (15.0, 40), (60.0, 16)):
        seen = window(*(sample(interval_s * number, generation_tokens=number) for number in range(300)))
        assert len(seen.steps) == kept


def test_a_longer_threshold_makes_the_window_longer() -> None:
    patient = Watcher(SERVER, replace(DEFAULT, hit_rate_over_s=900.0))
    for number in range(300):
        patient.take(sample(15.0 * number, generation_tokens=number))
    assert len(patient.window.steps) == 60


def test_the_steps_of_a_server_share_the_names_of_its_engines() -> None:
    names = (("a model", str(number)) for number in (0, 0, 0))
    seen = window(
        *(sample(5.0 * number, EngineSample(*"/".join(name).split("/"))) for number, name in enumerate(names))
    )
    assert seen.steps[0].engines[0].model is seen.steps[1].engines[0].model


def test_samples_next_to_no_time_apart_are_one() -> None:
    seen = window(sample(0, generation_tokens=0), sample(5e-324, generation_tokens=1e9))
    assert seen.rate("generation_tokens") is None and not seen.steps
    seen.add(sample(5, generation_tokens=1e9 + 50))
    assert seen.rate("generation_tokens") == pytest.approx((1e9 + 50) / 5)


def test_a_sample_that_comes_twice_ends_no_step_and_forgets_none() -> None:
    seen = window(sample(0, generation_tokens=0), sample(5, generation_tokens=50), sample(5, generation_tokens=50))
    assert seen.rate("generation_tokens") == pytest.approx(10)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9) | st.none()), min_size=2, max_size=40))
@example([(0.0, 0.0), (5e-324, 1.0)])
def test_no_series_of_looks_makes_a_negative_or_endless_rate(looks) -> None:  # type: ignore[no-untyped-def]
    seen = window(*(sample(time_s, generation_tokens=total) for time_s, total in looks))
    rate = seen.rate("generation_tokens")
    assert rate is None or 0 <= rate < float("inf")
    assert all(step.seconds > 0 for step in seen.steps)


COUNTS = st.lists(st.integers(0, 50), min_size=3, max_size=3)


@given(COUNTS, COUNTS, st.floats(0, 1))
def test_a_quantile_lies_inside_the_bounds_and_rises_with_its_share(first, second, share) -> None:  # type: ignore[no-untyped-def]
    bounds = (1.0, 5.0, float("inf"))

    def made(counts: list[int]) -> Histogram:
        return Histogram(bounds, (counts[0], sum(counts[:2]), sum(counts)), 1.0)

    old = made(first)
    new = old.plus(made(second))
    grown = new.since(old)
    assert grown is not None and grown.counts == made(second).counts
    value, more = grown.quantile(share), grown.quantile(min(share + 0.1, 1.0))
    assert (value is None) == (sum(second) == 0)
    if value is not None and more is not None:
        assert 0 <= value <= more <= 5.0
