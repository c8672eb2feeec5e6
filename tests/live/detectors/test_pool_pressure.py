from __future__ import annotations

from fake_server import SERVER, FakeServer, engine

from legroom.live.detectors.pool_pressure import PoolPressure
from legroom.live.metrics.sample import Sample

FULL = {"kv_use": 0.99, "running": 40.0, "add_generation_tokens": 500.0}


def test_a_full_pool_alone_is_healthy() -> None:
    assert FakeServer(PoolPressure).scrapes(20, **FULL) == [None] * 20


def test_waiting_while_the_pool_has_room_is_another_matter() -> None:
    assert FakeServer(PoolPressure).scrapes(20, kv_use=0.5, running=40, waiting=9) == [None] * 20


def test_a_full_pool_with_requests_waiting_is_said_at_the_third_look() -> None:
    server = FakeServer(PoolPressure)
    server.scrape(**FULL)
    findings = server.scrapes(3, **FULL, waiting=7)
    assert findings[:2] == [None, None]
    assert findings[2] is not None
    assert all(fact in findings[2].reason for fact in ("99%", "990 of 1,000", "40 running", "7 requests"))
    assert (findings[2].restart_helps, findings[2].entry, findings[2].is_seen_now) == (False, "LR403", True)


def test_a_full_pool_that_preempts_is_pressure_too_though_its_use_dips() -> None:
    server = FakeServer(PoolPressure)
    server.scrape(**FULL)
    uses = (0.99, 0.93, 0.97, 0.94)
    findings = [server.scrape(kv_use=use, running=39, add_preemptions=2, add_generation_tokens=9) for use in uses]
    assert findings[2] is not None and "2 requests were preempted" in findings[2].reason


def test_it_ends_only_after_half_a_minute_of_calm() -> None:
    server = FakeServer(PoolPressure)
    server.scrapes(5, **FULL, waiting=7)
    findings = server.scrapes(8, kv_use=0.5, running=40)
    assert all(findings[:5]) and findings[-1] is None
    assert [finding.is_seen_now for finding in findings[:5] if finding] == [False] * 5, (
        "not over yet, and no longer seen"
    )


def test_a_little_better_is_not_calm() -> None:
    server = FakeServer(PoolPressure)
    server.scrapes(5, **FULL, waiting=7)
    assert all(server.scrapes(20, kv_use=0.9, running=40, waiting=1))


def test_a_lost_look_in_between_does_not_start_the_count_anew() -> None:
    server = FakeServer(PoolPressure)
    server.scrapes(3, **FULL, waiting=7)
    assert server.fail("timeout") is None
    assert server.scrape(**FULL, waiting=7) is not None


def test_requests_deferred_for_other_reasons_do_not_count() -> None:
    server = FakeServer(PoolPressure)
    assert server.scrapes(20, **FULL, waiting=7, waiting_for_capacity=0) == [None] * 20


def test_of_several_engines_the_full_one_is_named() -> None:
    server = FakeServer(PoolPressure)
    for _ in range(5):
        both = (engine(engine="0", kv_use=0.1), engine(engine="1", kv_use=1.0, waiting=3.0, running=9.0))
        finding = server.take(Sample(server.time_s, SERVER, both))
    assert finding is not None and finding.engine == "engine 1"
    assert "of engine 1" in finding.reason


def test_a_pool_without_room_for_one_more_is_full_though_its_use_is_not() -> None:
    findings = FakeServer(PoolPressure).scrapes(5, kv_use=0.67, running=2, waiting=4)
    assert findings[-1] is not None and "no room for" in findings[-1].reason
    assert FakeServer(PoolPressure).scrapes(5, kv_use=0.67, running=4, waiting=4) == [None] * 5
