from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.crash_loop import CrashLoop
from legroom.live.detectors.several_servers import SeveralServers


def balanced(server: FakeServer, looks: int) -> list[object]:
    """Two replicas answer in turn, each with its own start time and totals."""
    start = server.time_s
    findings: list[object] = []
    for number in range(looks):
        server.others = {"process_start_s": start - (1000 if number % 2 else 5000)}
        server.totals = {"generation_tokens": 50.0 * number + (0 if number % 2 else 90_000)}
        findings.append(server.scrape(running=1))
    return findings


def test_a_balancer_in_front_of_several_servers_is_said() -> None:
    findings = balanced(FakeServer(SeveralServers), 6)
    assert findings[2] is None and findings[3] is not None
    assert "no rates" in findings[-1].reason  # type: ignore[attr-defined]


def test_it_is_not_taken_for_a_crash_loop_and_makes_no_rates() -> None:
    server = FakeServer(CrashLoop)
    assert balanced(server, 30) == [None] * 30
    assert server.window.rate("generation_tokens") is None


def test_a_restart_is_not_taken_for_a_balancer() -> None:
    server = FakeServer(SeveralServers)
    for _ in range(5):
        server.others = {"process_start_s": server.time_s - 2}
        assert server.scrapes(5, running=1) == [None] * 5
