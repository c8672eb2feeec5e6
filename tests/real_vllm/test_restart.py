"""A real vLLM restarted under load through the guard, by the sidecar and by `run`: no accepted request is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from restart_load import GuardedServer, HeldServer, Load

from legroom.live.journal.journal import Journal


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory):
    held = GuardedServer(vllm_python, tmp_path_factory.mktemp("restart"))
    try:
        held.start()
        held.start_sidecar()
        yield held
    finally:
        held.stop()


async def restarted_under_load(server: GuardedServer) -> Load:
    async with Load(server.url, server.model) as load:
        await load.until(lambda: load.counts["completed"] >= 24)
        load.closed_s = time.monotonic()
        assert server.ask_for_restart()["accepted"]
        with Journal.open(server.folder / "journal.db") as journal:
            await load.until(lambda: journal.actions() and not journal.unfinished_actions())
        completed = load.counts["completed"]
        await load.until(lambda: load.counts["completed"] >= completed + 24)
    return load


def test_a_restart_under_load_loses_no_accepted_request(server):
    load = asyncio.run(restarted_under_load(server))
    assert load.lost == []
    assert load.counts["refused"] > 0, "new requests were told to come again"
    with Journal.open(server.folder / "journal.db") as journal:
        (action,) = journal.actions()
    assert action.state == "done"
    assert [stage.name for stage in action.stages] == ["draining", "drained", "launched", "restarted"]
    assert "waited_s" in action.stage("drained").detail


async def restarted_by_run(server: HeldServer) -> Load:
    async with Load(server.url, server.model) as load:
        await load.until(lambda: load.counts["completed"] >= 24)
        load.closed_s = time.monotonic()
        await asyncio.to_thread(server.restart)
        completed = load.counts["completed"]
        await load.until(lambda: load.counts["completed"] >= completed + 24)
    return load


def test_run_empties_the_guard_before_it_stops_the_server(vllm_python: Path, tmp_path: Path):
    server = HeldServer(vllm_python, tmp_path, guard=True)
    try:
        server.wait_until_up()
        load = asyncio.run(restarted_by_run(server))
    finally:
        server.stop()
    assert load.lost == []
    assert load.counts["refused"] > 0, "new requests were told to come again"
    assert "the guard takes nothing new; drained in" in server.said()
