from __future__ import annotations

import random

from fake_server import FakeServer

from legroom.live.detectors.memory_creep import MemoryCreep
from legroom.units import GIB, MIB

PLAN = {"gpu": {"total_bytes": 80 * GIB, "count": 1}}


def hours(server: FakeServer, count: float, per_hour: float, noise: float = 0.0, field: str = "memory_used_bytes"):  # type: ignore[no-untyped-def]
    chance = random.Random(3)
    finding = None
    for number in range(int(count * 12)):
        used = 60 * GIB + per_hour * number / 12 + chance.uniform(-noise, noise)
        finding = server.scrape(running=1, **{field: int(used)})
    return finding


def test_growth_over_hours_is_said_with_the_time_left() -> None:
    finding = hours(FakeServer(MemoryCreep, PLAN, interval_s=300), 8, 500 * MIB, noise=200 * MIB)
    assert finding is not None
    assert "is full in 3" in finding.reason
    assert finding.restart_helps and finding.situation == "chronic"


def test_noise_alone_is_no_growth() -> None:
    assert hours(FakeServer(MemoryCreep, interval_s=300), 9, 0, noise=500 * MIB) is None


def test_the_first_two_hours_are_warm_up() -> None:
    assert hours(FakeServer(MemoryCreep, interval_s=300), 1.9, 900 * MIB) is None


def test_growth_that_takes_weeks_is_let_be() -> None:
    assert hours(FakeServer(MemoryCreep, interval_s=300), 9, 20 * MIB) is None


def test_one_step_up_is_no_slope() -> None:
    server = FakeServer(MemoryCreep, interval_s=300)
    for number in range(12 * 9):
        finding = server.scrape(running=1, memory_used_bytes=(60 if number < 30 else 64) * GIB)
    assert finding is None


def test_a_clock_that_is_set_forward_makes_no_growth_of_hours() -> None:
    server = FakeServer(MemoryCreep, interval_s=300)
    hours(server, 1, 900 * MIB)
    server.time_s += 3 * 3600
    for _ in range(3):
        finding = server.scrape(running=1, memory_used_bytes=63 * GIB)
    assert finding is None


def test_telemetry_of_the_workers_serves_where_there_is_no_nvml() -> None:
    finding = hours(FakeServer(MemoryCreep, interval_s=300), 6, 300 * MIB, field="reserved_bytes")
    assert finding is not None and "by the workers" in finding.reason
