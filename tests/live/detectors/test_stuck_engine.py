from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.stuck_engine import StuckEngine


def test_an_engine_whose_figures_stand_still_while_requests_run_is_stuck() -> None:
    server = FakeServer(StuckEngine)
    server.scrapes(5, running=4, kv_use=0.2, add_generation_tokens=100)
    findings = server.scrapes(3, running=4, kv_use=0.2)
    assert findings[:2] == [None, None]
    assert findings[2] is not None and findings[2].restart_helps
    assert "4 requests" in findings[2].reason and "15 s" in findings[2].reason


def test_a_long_prefill_moves_the_pool_and_is_not_stuck() -> None:
    server = FakeServer(StuckEngine)
    assert [server.scrape(running=1, kv_use=0.01 * number) for number in range(20)] == [None] * 20


def test_an_idle_server_is_not_stuck() -> None:
    assert FakeServer(StuckEngine).scrapes(20) == [None] * 20


def test_a_sleeping_engine_is_not_stuck() -> None:
    assert FakeServer(StuckEngine).scrapes(20, running=1, asleep=True) == [None] * 20


def test_fast_looks_do_not_make_one_slow_step_a_hang() -> None:
    server = FakeServer(StuckEngine, interval_s=1.0)
    server.scrape(running=1, add_generation_tokens=1)
    assert server.scrapes(8, running=1) == [None] * 8
    assert server.scrapes(4, running=1)[-1] is not None


def test_an_engine_that_compiles_for_its_first_request_has_time_for_it() -> None:
    findings = FakeServer(StuckEngine).scrapes(26, running=1, kv_use=0.1)
    assert findings[2] is None and findings[4] is not None and "compiling" in findings[4].reason
    assert {(finding.severity, finding.restart_helps) for finding in findings[:24] if finding} == {("warning", False)}
    assert findings[25] is not None and (findings[25].severity, findings[25].restart_helps) == ("critical", True)


def test_the_first_token_ends_it_after_calm() -> None:
    server = FakeServer(StuckEngine)
    server.scrape(running=4, add_generation_tokens=1)
    assert server.scrapes(5, running=4)[-1] is not None
    assert server.scrapes(9, running=4, add_generation_tokens=10)[-1] is None


def test_an_engine_that_is_stopped_while_nothing_runs_is_found_before_a_request_is() -> None:
    server = FakeServer(StuckEngine)
    server.scrapes(5)
    server.others["stopped_engines"] = 1
    finding = server.scrapes(3)[2]
    assert finding is not None and (finding.severity, finding.restart_helps) == ("critical", True)
    assert "stopped" in finding.title and "SIGSTOP" in finding.reason


def test_an_engine_that_is_let_go_on_is_no_longer_stopped() -> None:
    server = FakeServer(StuckEngine)
    server.others["stopped_engines"] = 2
    assert server.scrapes(3)[2] is not None
    server.others["stopped_engines"] = 0
    assert server.scrapes(9)[-1] is None
