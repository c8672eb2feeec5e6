from __future__ import annotations

import pytest
from fake_server import FakeServer

from legroom.live.detectors.queue_backlog import QueueBacklog


def test_a_short_queue_that_is_served_at_once_is_fine() -> None:
    findings = FakeServer(QueueBacklog).scrapes(20, running=8, waiting=9, add_finished=50)
    assert findings == [None] * 20


def test_a_queue_longer_than_ten_seconds_of_service_is_said() -> None:
    server = FakeServer(QueueBacklog)
    server.scrape(running=8)
    findings = server.scrapes(3, running=8, waiting=60, add_finished=10)
    assert findings[2] is not None
    assert findings[2].numbers["wait_s"] == pytest.approx(30)
    assert "waits 30 s" in findings[2].reason


def test_it_says_whether_the_pool_or_the_batch_holds_them_back() -> None:
    for use, holder in ((0.3, "the batch limit"), (0.99, "the pool")):
        server = FakeServer(QueueBacklog)
        finding = server.scrapes(5, kv_use=use, running=8, waiting=60, add_finished=10)[-1]
        assert finding is not None and holder in finding.reason


def test_a_queue_that_nothing_comes_out_of_is_said_too() -> None:
    findings = FakeServer(QueueBacklog).scrapes(5, running=8, waiting=60)
    assert findings[-1] is not None and "none finished" in findings[-1].reason


def test_a_few_that_wait_are_no_queue() -> None:
    assert FakeServer(QueueBacklog).scrapes(20, running=1, waiting=3) == [None] * 20


def test_a_burst_of_two_looks_is_none() -> None:
    server = FakeServer(QueueBacklog)
    server.scrape()
    assert server.scrapes(2, running=8, waiting=60, add_finished=1) == [None, None]
    assert server.scrapes(5, running=8) == [None] * 5


def test_a_queue_that_grows_is_judged_by_where_it_will_be() -> None:
    server = FakeServer(QueueBacklog)
    server.scrape(running=8, add_finished=50)
    findings = [server.scrape(running=8, waiting=30.0 * number, add_finished=50) for number in range(1, 4)]
    assert findings[2] is not None
    assert all(fact in findings[2].reason for fact in ("90 requests", "8 running", "6 more"))
    assert findings[2].numbers["wait_s"] == pytest.approx(9)


def test_a_queue_as_long_that_shrinks_is_none() -> None:
    server = FakeServer(QueueBacklog)
    server.scrape(running=8, add_finished=50)
    assert [server.scrape(running=8, waiting=90.0 - number, add_finished=50) for number in range(6)] == [None] * 6


def test_a_queue_grows_by_those_that_wait_for_a_place_alone() -> None:
    server = FakeServer(QueueBacklog)
    for number in range(4):  # ever more wait for a place, fewer for a transfer
        waiting = 30.0 * number
        finding = server.scrape(running=8, waiting=500.0, waiting_for_capacity=waiting, add_finished=50)
    assert finding is not None and "6 more every second" in finding.reason
