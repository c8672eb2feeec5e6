"""A real vLLM driven into its troubles: backlog, thrash, a useless prefix cache, a stopped engine, a crash.

The loads and the looking are those of bench/detect.py, at its own interval; the server is started once. The loads have
to outrun the server, so this needs a machine that does nothing else, and seven minutes: it runs where
LEGROOM_REAL_LOADS=1 says so. What such runs recorded is replayed in tests/live everywhere.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import detect
from restart_load import free_port

pytestmark = pytest.mark.skipif(
    os.environ.get("LEGROOM_REAL_LOADS") != "1", reason="needs a machine of its own: LEGROOM_REAL_LOADS=1 runs it"
)


@pytest.fixture(scope="module")
def outcomes(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, detect.Outcome]:
    folder = tmp_path_factory.mktemp("detect")
    arguments = Namespace(python=vllm_python, port=free_port(), record=folder / "recordings")
    found = asyncio.run(detect.all_troubles(arguments, detect.tiny_model(folder), folder))
    return {outcome.name: outcome for outcome in found}


@pytest.mark.parametrize("trouble", [trouble.name for trouble in detect.TROUBLES if trouble.kind])
def test_a_trouble_of_a_real_server_is_found_within_three_looks(
    outcomes: dict[str, detect.Outcome], trouble: str
) -> None:
    outcome = outcomes[trouble]
    assert outcome.reason, f"{outcome.kind} was not found"
    assert outcome.in_time, f"visible at look {outcome.visible_at}, found at {outcome.found_at}"


def test_a_full_pool_that_nobody_waits_for_is_healthy(outcomes: dict[str, detect.Outcome]) -> None:
    full = outcomes["full pool"]
    assert full.visible_at is not None, "the pool was never full"
    assert full.others == []


def test_what_a_stopped_engine_looks_like_is_taken_for_nothing_else(outcomes: dict[str, detect.Outcome]) -> None:
    assert "unreachable" not in outcomes["stuck engine"].others
    assert "crash_loop" not in outcomes["crash"].others
