from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.base import DetectorFinding
from legroom.live.detectors.crash_loop import CrashLoop


def crash(server: FakeServer, away: int = 6) -> DetectorFinding | None:
    server.scrapes(3, running=1, add_generation_tokens=100)
    for _ in range(away):
        server.fail()
    server.totals = {}
    server.others = {"process_start_s": server.time_s - 1}
    return server.scrape()


def test_three_starts_in_a_quarter_of_an_hour_are_a_loop() -> None:
    server = FakeServer(CrashLoop)
    server.others = {"process_start_s": 1.0}
    findings = [crash(server) for _ in range(3)]
    assert findings[:2] == [None, None]
    assert findings[2] is not None and "3 starts" in findings[2].reason
    assert not findings[2].restart_helps


def test_without_a_start_time_totals_that_fell_tell_it() -> None:
    server = FakeServer(CrashLoop)
    for _ in range(4):
        server.scrapes(3, running=1, add_generation_tokens=100)
        server.totals = {}
        finding = server.scrape(add_generation_tokens=1)
    assert finding is not None


def test_one_planned_restart_is_none() -> None:
    server = FakeServer(CrashLoop)
    server.others = {"process_start_s": 1.0}
    assert crash(server) is None
    assert server.scrapes(300, running=1, add_generation_tokens=10) == [None] * 300
