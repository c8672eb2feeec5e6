from __future__ import annotations

import pytest
from fake_server import FakeServer

from legroom.live.detectors.no_traffic import NoTraffic
from legroom.live.detectors.queue_backlog import QueueBacklog
from legroom.live.detectors.refused_load import RefusedLoad
from legroom.live.metrics.sample import GuardSample


def guarded(server: FakeServer, *guards: GuardSample, **figures: float):  # type: ignore[no-untyped-def]
    server.others = {"guards": guards}
    return server.scrape(**figures)


def test_refusals_of_the_guard_are_counted_with_its_time_outs() -> None:
    server = FakeServer(RefusedLoad)
    findings = [
        guarded(server, GuardSample("", 5, 2.0 * n, 15.0 * n, 3.0 * n), running=4, add_finished=2) for n in range(5)
    ]
    assert findings[2] is None and findings[-1] is not None
    assert findings[-1].numbers == pytest.approx({"refused": 72, "timed_out": 12, "refused_ratio": 0.9})
    assert f"in {4 * server.interval_s:.0f} s" in findings[-1].reason


def test_vllms_own_rejections_count_too() -> None:
    server = FakeServer(RefusedLoad)
    for number in range(5):
        server.others = {"rejections": 10.0 * number}
        finding = server.scrape(running=4, add_finished=10)
    assert finding is not None and finding.numbers["refused_ratio"] == pytest.approx(40 / 80)


@pytest.mark.parametrize("refused", [0.0, 1.0])
def test_one_refusal_in_a_hundred_is_no_finding(refused: float) -> None:
    server = FakeServer(RefusedLoad)
    assert {guarded(server, GuardSample("", 0, 99.0 * n, refused * n), running=4) for n in range(30)} == {None}


def test_a_scrape_of_another_api_server_is_compared_with_its_own_last_counts() -> None:
    server = FakeServer(RefusedLoad)
    pages = [GuardSample("11", 0, 50, 900), GuardSample("12", 0, 50, 2)]
    assert {guarded(server, pages[n % 2], running=4) for n in range(30)} == {None}


def test_a_queue_in_the_guard_is_a_backlog_and_no_idleness() -> None:
    server = FakeServer(QueueBacklog)
    finding = [guarded(server, GuardSample("", 275), running=25, kv_use=0.4, add_finished=5) for _ in range(5)][-1]
    assert finding is not None and finding.numbers["waiting"] == 275
    assert "guard holds 275" in finding.reason
    quiet = FakeServer(NoTraffic)
    assert {guarded(quiet, GuardSample("", 0, 0, n)) for n in range(200)} == {None}
