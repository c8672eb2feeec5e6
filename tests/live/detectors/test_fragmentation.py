from __future__ import annotations

from fake_server import FakeServer

from legroom.live.detectors.fragmentation import Fragmentation
from legroom.units import GIB


def test_memory_held_in_pieces_for_minutes_is_said() -> None:
    findings = FakeServer(Fragmentation).scrapes(70, reserved_bytes=70 * GIB, allocated_bytes=55 * GIB)
    assert findings[30] is None
    assert findings[-1] is not None and "15.00 GiB (21%)" in findings[-1].reason


def test_a_little_that_is_kept_is_fine() -> None:
    assert FakeServer(Fragmentation).scrapes(90, reserved_bytes=70 * GIB, allocated_bytes=66 * GIB) == [None] * 90


def test_without_telemetry_nothing_is_said() -> None:
    assert FakeServer(Fragmentation).scrapes(90, memory_used_bytes=70 * GIB) == [None] * 90
