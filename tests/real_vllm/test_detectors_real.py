"""A real vLLM driven into a backlog, thrash, a useless prefix cache, a stopped engine and a crash.

The loads have to outrun the server, so this needs a quiet machine and seven minutes: LEGROOM_REAL_LOADS=1 runs it.
tests/live replays what such runs recorded.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import provoked_incidents
import pytest
from free_ports import free_port
from provoked_incidents import Outcome
from tiny_models import write_model

pytestmark = pytest.mark.skipif(
    os.environ.get("LEGROOM_REAL_LOADS") != "1", reason="needs a machine of its own: LEGROOM_REAL_LOADS=1 runs it"
)


@pytest.fixture(scope="module")
def outcomes(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("detect")
    model = Path(write_model(folder / "tiny"))
    found = asyncio.run(provoked_incidents.provoke_all(vllm_python, free_port(), model, folder))
    return {outcome.name: outcome for outcome in found}


@pytest.mark.parametrize("name", [incident.name for incident in provoked_incidents.INCIDENTS if incident.kind])
def test_an_incident_of_a_real_server_is_found_within_three_samples(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.reason, f"{outcome.kind} was not found"
    assert outcome.in_time, f"visible in sample {outcome.visible_at}, found at {outcome.found_at}"


def test_a_full_pool_without_a_queue_is_healthy(outcomes: dict[str, Outcome]) -> None:
    full = outcomes["full pool"]
    assert full.visible_at is not None, "the pool was never full"
    assert full.others == []


def test_a_stopped_engine_is_reported_as_nothing_else(outcomes: dict[str, Outcome]) -> None:
    assert "unreachable" not in outcomes["stuck engine"].others
    assert "crash_loop" not in outcomes["crash"].others
