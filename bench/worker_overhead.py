#!/usr/bin/env python3
"""What the plugin inside vLLM's workers costs: two servers alike, one with it, loaded in turn in short rounds.

    worker_overhead.py VLLM_PYTHON [--rounds 60] [--port 18310] [--json FILE]

Both servers run all the time and only one is loaded at a moment, so each round has a partner a second away. Throughput
is given by the clock, as the median of the pairs' ratios with its 95 % interval, and by the processor time of the
server's processes for a request, which other work on the machine changes little. Memory is what the plugin adds to a
process that has loaded what a worker has (psutil, prometheus_client, torch), after as many readings as fill its rings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from guard_overhead import BODY, median_interval
from guard_toggle import Connection, RealServer, print_table

MEMORY = """
import gc, json, sys, types
import torch, psutil, prometheus_client
from vllm.v1.worker import worker_base
sys.modules["vllm.distributed.parallel_state"]._WORLD = types.SimpleNamespace(rank=0)
rss = lambda: (gc.collect(), psutil.Process().memory_info().rss)[1]
psutil.Process().memory_info()
before = rss()
from legroom.worker import telemetry
telemetry.report.__defaults__ = (0.002,)
telemetry.join()
from legroom.worker.memory import read
import time
time.sleep(4)
print(json.dumps({"added_bytes": rss() - before}))
"""
"""Three hundred readings fill both rings; the rest of the time passes."""


def tree_cpu_s(pid: int) -> float:
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


async def rounds_of(servers: dict[str, RealServer], rounds: int, clients: int = 8, each: int = 4) -> dict[str, Any]:
    rates: dict[str, list[float]] = {side: [] for side in servers}
    cpu = dict.fromkeys(servers, 0.0)

    async def work(client: Connection) -> None:
        for _ in range(each):
            status, _, _ = await client.post("/v1/completions", BODY, True)
            assert status == 200

    for number in range(rounds + 2):
        for side in sorted(servers, reverse=bool(number % 2)):
            # Anew in every round: a server closes connections that wait for seconds.
            connections = [await Connection(servers[side].port).open() for _ in range(clients)]
            pid = servers[side].child.pid
            used, began = tree_cpu_s(pid), time.perf_counter()
            await asyncio.gather(*map(work, connections))
            if number >= 2:  # the first rounds warm both
                rates[side].append(clients * each / (time.perf_counter() - began))
                cpu[side] += tree_cpu_s(pid) - used
            for client in connections:
                client.close()
    ratios = [with_ / without for with_, without in zip(rates["with"], rates["without"], strict=True)]
    requests = rounds * clients * each
    return {
        "requests_per_s": {side: statistics.median(values) for side, values in rates.items()},
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratio_95": list(median_interval(ratios)),
        "cpu_ms_a_request": {side: seconds / requests * 1e3 for side, seconds in cpu.items()},
        "cpu_ratio": cpu["without"] / cpu["with"],
        "rounds": rounds, "requests_a_side": requests,
    }  # fmt: skip


def added_memory_bytes(python: Path, paths: str) -> int:
    """In the median of three processes."""
    values = []
    for _ in range(3):
        env = os.environ | {"PYTHONPATH": paths, "LEGROOM_WORKER_MEMORY": "1"}
        run = subprocess.run([python, "-c", MEMORY], env=env, capture_output=True, text=True, check=True)
        values.append(json.loads(run.stdout.strip().splitlines()[-1])["added_bytes"])
    return sorted(values)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--port", type=int, default=18310)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real_vllm"))
    from tiny_models import beside_vllm

    with tempfile.TemporaryDirectory() as folder:
        beside = beside_vllm(Path(folder))
        paths = os.pathsep.join((beside, str(Path(__file__).parent)))
        flags = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "16M")
        env = {"PYTHONPATH": paths, "LEGROOM_HOME": folder, "TMPDIR": folder}
        with (
            RealServer(args.python, args.port, *flags, env=env | {"LEGROOM_WORKER_MEMORY": "1"}) as with_,
            RealServer(args.python, args.port + 1, *flags, env=env) as without,
        ):
            measured = asyncio.run(rounds_of({"with": with_, "without": without}, args.rounds))
            assert "legroom_worker_host_rss_bytes" in with_.metrics(), "the plugin is not loaded"
            assert "legroom_worker_host_rss_bytes" not in without.metrics()
        measured["added_bytes_a_worker"] = added_memory_bytes(args.python, beside)
    low, high = measured["throughput_ratio_95"]
    print_table([
        ("", "with", "without"),
        ("requests a second", *(f"{measured['requests_per_s'][side]:.1f}" for side in ("with", "without"))),
        ("CPU a request, ms", *(f"{measured['cpu_ms_a_request'][side]:.2f}" for side in ("with", "without"))),
    ])  # fmt: skip
    print(f"throughput {measured['throughput_ratio']:.2%} ({low:.1%} to {high:.1%}), by processor time "
          f"{measured['cpu_ratio']:.2%}; {measured['added_bytes_a_worker'] / 1e6:.1f} MB a worker")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
