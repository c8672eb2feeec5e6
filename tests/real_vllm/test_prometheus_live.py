"""A real Prometheus with the exported rules beside a real vLLM: pressure raises its alerts and no other.

The stage and the loads are those of bench/prometheus_live.py, which has more phases.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import prometheus_live as live

ROOT = Path(__file__).parents[2]


def free_ports() -> Iterator[int]:
    """Below those that the system hands out: a server takes seconds to bind, and by then a connection may have one."""
    for port in range(18620, 18700):
        with socket.socket() as tried:
            is_free = tried.connect_ex(("127.0.0.1", port)) != 0
        if is_free:
            yield port


@pytest.fixture(scope="module")
def played(vllm_python: Path) -> Iterator[tuple[live.Stage, dict[str, live.Seen]]]:
    tool = shutil.which("prometheus")
    if tool is None:
        pytest.skip("no prometheus here: run bin/setup-tools")
    with live.staged(vllm_python, tool, free_ports()) as stage:
        phases = [phase for phase in live.PHASES if phase.name in ("healthy", "pressure")]
        yield stage, {phase.name: asyncio.run(live.play(stage, phase, healthy_s=20)) for phase in phases}


def test_a_healthy_load_raises_no_alert(played: tuple[live.Stage, dict[str, live.Seen]]) -> None:
    assert played[1]["healthy"].problems == []


def test_pressure_raises_its_alerts_and_no_other_and_they_resolve(
    played: tuple[live.Stage, dict[str, live.Seen]],
) -> None:
    assert played[1]["pressure"].problems == []


def test_every_expression_of_the_dashboard_returns_data(played: tuple[live.Stage, dict[str, live.Seen]]) -> None:
    assert live.empty_expressions(played[0]) == []
