from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.no_traffic import NoTraffic


def test_ten_minutes_without_a_request_are_said_as_information() -> None:
    findings = FakeServer(NoTraffic).scrapes(125)
    assert findings[60] is None
    assert findings[-1] is not None and findings[-1].severity == "info" and not findings[-1].restart_helps


def test_the_first_request_ends_it() -> None:
    server = FakeServer(NoTraffic)
    server.scrapes(125)
    assert server.scrape(running=1) is None


def test_a_request_that_runs_for_long_is_traffic() -> None:
    assert FakeServer(NoTraffic).scrapes(200, running=1) == [None] * 200
