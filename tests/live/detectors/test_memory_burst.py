from __future__ import annotations

from typing import Any

import pytest
from fake_server import FakeServer

from legroom.live.detectors.memory_burst import MemoryBurst
from legroom.live.remedies import remedies_for
from legroom.units import GIB

QUIET: dict[str, Any] = {
    "allocated_bytes": 120 * GIB,
    "reserved_bytes": 121 * GIB,
    "others_bytes": 0,
    "alloc_retries": 2,
}


def test_a_retry_of_the_allocator_is_said_at_the_next_look() -> None:
    server = FakeServer(MemoryBurst)
    assert set(server.scrapes(5, **QUIET)) == {None}
    finding = server.scrape(**QUIET | {"alloc_retries": 3})
    assert finding is not None and finding.cause == "runtime_activation_burst"
    assert "(1 time)" in finding.reason


def test_it_is_over_after_a_minute_and_a_half_without_another() -> None:
    server = FakeServer(MemoryBurst)
    server.scrapes(2, **QUIET)
    later = server.scrapes(30, **QUIET | {"alloc_retries": 3})
    assert later[0] is not None and later[-1] is None


@pytest.mark.parametrize(
    "why",
    [
        pytest.param({"allocated_bytes": 90 * GIB}, id="it lies in pieces"),
        pytest.param({"others_bytes": 20 * GIB}, id="a neighbour took it"),
        pytest.param({"allocated_bytes": 130 * GIB, "reserved_bytes": 131 * GIB}, id="it grew"),
    ],
)
def test_a_retry_that_something_lasting_explains_is_no_burst(why: dict[str, int]) -> None:
    server = FakeServer(MemoryBurst)
    server.scrapes(5, **QUIET)
    assert set(server.scrapes(5, **QUIET | why | {"alloc_retries": 4})) == {None}


def test_a_server_that_started_anew_counts_from_its_own_zero() -> None:
    server = FakeServer(MemoryBurst)
    server.scrapes(5, **QUIET)
    assert set(server.scrapes(5, **QUIET | {"alloc_retries": 1})) == {None}


def test_without_telemetry_nothing_is_said() -> None:
    assert set(FakeServer(MemoryBurst).scrapes(5)) == {None}


def test_the_answer_asks_for_a_plan_and_the_black_box() -> None:
    server = FakeServer(MemoryBurst)
    server.scrapes(2, **QUIET)
    finding = server.scrape(**QUIET | {"alloc_retries": 3})
    assert finding is not None
    assert any("LEGROOM_WORKER_MEMORY=1" in step for fix in remedies_for(finding, server.window) for step in fix.steps)
