from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.unreachable import Unreachable


def test_a_server_that_is_gone_is_said_at_the_third_failed_look() -> None:
    server = FakeServer(Unreachable)
    server.scrapes(3, running=5)
    findings = [server.fail() for _ in range(3)]
    assert findings[:2] == [None, None]
    assert findings[2] is not None
    assert (findings[2].severity, findings[2].restart_helps) == ("critical", True)
    assert all(fact in findings[2].reason for fact in ("3 scrapes", "15 s ago", "5 requests"))


def test_one_lost_look_is_nothing() -> None:
    server = FakeServer(Unreachable)
    findings = [server.fail("timeout") if number % 3 == 0 else server.scrape() for number in range(20)]
    assert findings == [None] * 20


def test_what_a_restart_cannot_mend_does_not_ask_for_one() -> None:
    for kind in ("auth", "tls", "dns", "not_found", "not_metrics"):
        server = FakeServer(Unreachable)
        server.scrape()
        finding = [server.fail(kind) for _ in range(4)][-1]  # type: ignore[arg-type]
        assert finding is not None and (finding.restart_helps, finding.severity) == (False, "warning")


def test_a_server_that_never_answered_is_not_restarted() -> None:
    server = FakeServer(Unreachable)
    finding = [server.fail() for _ in range(4)][-1]
    assert finding is not None and not finding.restart_helps and "it never did" in finding.reason


def test_two_answers_end_it() -> None:
    server = FakeServer(Unreachable)
    for _ in range(4):
        server.fail()
    assert server.scrapes(2)[-1] is None
