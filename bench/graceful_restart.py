"""A real vLLM restarted under load, four ways, and what became of every request: a table and JSON.

    LEGROOM_VLLM_PYTHON=.vllm/bin/python python bench/graceful_restart.py [--ways sidecar run+guard run plain]

- sidecar: legroom's sidecar closes the guard's door (503 with Retry-After), waits for running and waiting to be zero,
  and calls the restart command.
- run+guard: SIGHUP to `legroom run` of a server with the guard inside: `run` closes it, waits, and stops the server.
- run: SIGHUP to `legroom run` without a guard: vLLM drains by itself (`--shutdown-timeout`), and requests that come
  meanwhile get its 500.
- plain: SIGTERM and start again, as a unit's restart does, with vLLM's default of no drain.

Counted at the client: lost is every request that was neither completed, nor refused with 503 and Retry-After, nor
without anybody to connect to.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench_harness import ROOT, arguments, print_table
from restart_load import GuardedServer, HeldServer, Load

from legroom.live.journal.journal import Journal

WARM = 40


async def loaded(url: str, model: str, restart: Callable[[Load], Awaitable[None]]) -> dict[str, Any]:
    """Load before, during and after a restart."""
    async with Load(url, model) as load:
        await load.until(lambda: load.counts["completed"] >= WARM, 60)
        began_s = time.monotonic()
        load.closed_s = began_s
        await restart(load)
        took_s = time.monotonic() - began_s
        completed = load.counts["completed"]
        await load.until(lambda: load.counts["completed"] >= completed + WARM, 60)
    return {**load.counts, "lost": len(load.lost), "what_was_lost": load.lost[:5], "restart_s": round(took_s, 1)}


def by_sidecar(server: GuardedServer) -> dict[str, Any]:
    server.start_sidecar()

    async def restart(load: Load) -> None:
        server.ask_for_restart()
        with Journal.open(server.folder / "journal.db") as journal:
            await load.until(lambda: journal.actions() and not journal.actions()[-1].unfinished)
            action = journal.actions()[-1]
            assert action.state == "done", action
            drained = action.stage("drained")
            figures["drain_s"] = drained.detail.get("waited_s") if drained else None

    figures: dict[str, Any] = {}
    return asyncio.run(loaded(server.url, server.model, restart)) | figures


def plainly(server: GuardedServer) -> dict[str, Any]:
    async def restart(load: Load) -> None:
        load.closed_s = float("inf")  # no door is closed: nobody told the clients anything
        await asyncio.to_thread(subprocess.run, server.restart_words, check=True)
        await asyncio.to_thread(server.wait_until_up)

    return asyncio.run(loaded(server.url, server.model, restart))


def by_run(python: Path, guard: bool) -> dict[str, Any]:
    async def restart(load: Load) -> None:
        if not guard:
            load.closed_s = float("inf")
        await asyncio.to_thread(server.restart)

    with tempfile.TemporaryDirectory(prefix="legroom-restart-") as folder:
        server = HeldServer(python, Path(folder), guard)
        try:
            server.wait_until_up()
            return asyncio.run(loaded(server.url, server.model, restart))
        finally:
            server.stop()


def main() -> int:
    ways = arguments(__doc__, ways=("sidecar", "run+guard", "run", "plain")).ways
    named = os.environ.get("LEGROOM_VLLM_PYTHON")
    python = Path(named) if named else ROOT / ".vllm/bin/python"
    if not python.exists():
        raise SystemExit("no real vLLM here: run bin/setup-vllm, or name one's Python in LEGROOM_VLLM_PYTHON")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="legroom-restart-") as folder:
        if {"sidecar", "plain"} & set(ways):
            server = GuardedServer(python, Path(folder))
            try:
                server.start()
                if "sidecar" in ways:
                    rows["sidecar"] = by_sidecar(server)
                if "plain" in ways:
                    rows["plain"] = plainly(server)
            finally:
                server.stop()
    for way in (way for way in ("run+guard", "run") if way in ways):
        rows[way] = by_run(python, guard=way == "run+guard")
    columns = ("completed", "refused", "nobody there", "lost", "restart_s")
    print_table([("way", *columns), *((way, *(row.get(name, 0) for name in columns)) for way, row in rows.items())])
    for way, row in rows.items():
        for one in row["what_was_lost"]:
            print(f"{way} lost: {one}")
    print(json.dumps(rows))
    return 1 if any(rows.get(way, {}).get("lost") for way in ("sidecar", "run+guard")) else 0


if __name__ == "__main__":
    sys.exit(main())
