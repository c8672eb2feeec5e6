from __future__ import annotations

import pytest
from fake_server import FakeServer

from legroom.live.detectors.preemption_thrash import PreemptionThrash

BUSY = {
    "kv_use": 0.95,
    "running": 20.0,
    "add_generation_tokens": 500.0,
    "add_prompt_tokens": 500.0,
    "add_finished": 5.0,
}


def test_no_preemption_is_no_thrash() -> None:
    assert FakeServer(PreemptionThrash).scrapes(30, **BUSY) == [None] * 30


def test_the_odd_preemption_of_a_busy_server_is_none_either() -> None:
    server = FakeServer(PreemptionThrash)
    findings = [server.scrape(**BUSY, add_preemptions=float(number % 12 == 0)) for number in range(60)]
    assert findings == [None] * 60


def test_work_done_again_is_said_within_three_looks_of_being_counted() -> None:
    server = FakeServer(PreemptionThrash)
    server.scrape(**BUSY)
    findings = server.scrapes(3, **BUSY, add_preemptions=4)
    assert findings[2] is not None
    # 760 tokens held by each, 12 times, against 3 x 1,000 useful ones.
    assert findings[2].numbers["recomputed_share"] == pytest.approx(12 * 760 / (12 * 760 + 3000))
    assert "by estimate" in findings[2].reason


def test_a_release_that_counts_recomputed_tokens_is_believed() -> None:
    server = FakeServer(PreemptionThrash)
    server.scrape(**BUSY, add_recomputed_tokens=0)
    findings = server.scrapes(3, **BUSY, add_preemptions=4, add_recomputed_tokens=1000)
    assert findings[2] is not None and findings[2].numbers["recomputed_share"] == pytest.approx(0.5)


def test_where_the_pool_is_unknown_preemptions_are_held_against_finished_requests() -> None:
    server = FakeServer(PreemptionThrash)
    server.scrape(**BUSY, num_blocks=None)
    findings = server.scrapes(3, **BUSY, add_preemptions=4, num_blocks=None)
    assert findings[2] is not None and "finished requests" in findings[2].reason


def test_preemptions_that_are_a_small_part_of_the_work_are_no_thrash() -> None:
    server = FakeServer(PreemptionThrash)
    findings = server.scrapes(30, **(BUSY | {"add_generation_tokens": 50_000.0}), add_preemptions=1)
    assert findings == [None] * 30


def test_totals_that_start_over_make_no_rate() -> None:
    server = FakeServer(PreemptionThrash)
    server.scrapes(5, **BUSY, add_preemptions=0)
    server.totals = {}
    assert server.scrapes(5, **BUSY) == [None] * 5
