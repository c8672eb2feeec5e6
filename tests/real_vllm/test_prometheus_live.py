"""A real Prometheus with the exported rules beside a real vLLM: pressure raises its alerts and no other.

LEGROOM_REAL_LOADS=1 adds the phases thrash, backlog, stuck and down, which need a quiet machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import prometheus_stage as live
import pytest

ALL_PHASES = os.environ.get("LEGROOM_REAL_LOADS") == "1"


def free_ports() -> Iterator[int]:
    """Below those that the system hands out: a server takes seconds to bind, and by then a connection may have one."""
    for port in range(18620, 18700):
        with socket.socket() as tried:
            is_free = tried.connect_ex(("127.0.0.1", port)) != 0
        if is_free:
            yield port


@pytest.fixture(scope="module")
def played(vllm_python: Path) -> Iterator[tuple[live.Stage, dict[str, live.PhaseOutcome]]]:
    tool = shutil.which("prometheus")
    if tool is None:
        pytest.skip("no prometheus here: run bin/setup-tools")
    with live.running_stage(vllm_python, tool, free_ports()) as stage:
        phases = [phase for phase in live.PHASES if ALL_PHASES or phase.name in ("healthy", "pressure")]
        yield stage, {phase.name: asyncio.run(live.play(stage, phase, healthy_s=20)) for phase in phases}


def test_each_load_raises_its_alerts_and_no_other_and_they_resolve(
    played: tuple[live.Stage, dict[str, live.PhaseOutcome]],
) -> None:
    assert {name: outcome.problems for name, outcome in played[1].items() if outcome.problems} == {}


def test_every_expression_of_the_dashboard_returns_data(
    played: tuple[live.Stage, dict[str, live.PhaseOutcome]],
) -> None:
    assert live.empty_expressions(played[0]) == []
