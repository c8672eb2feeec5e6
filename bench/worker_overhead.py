#!/usr/bin/env python3
"""What the plugin inside vLLM's workers costs: two servers alike, one with it, loaded in turn in short rounds.

    worker_overhead.py VLLM_PYTHON [--starts 4] [--rounds 100] [--amplified 1] [--port 18310] [--json FILE]

Both servers run all the time and only one is loaded at a moment, so each round has a partner a second away. A process
is a little faster or slower than its twin for as long as it lives, so the pair is started several times, each side
first in turn. Throughput is given by the clock, as the median of all pairs' ratios with its 95 % interval and as the
median of each start, and by the processor time of the server's processes for a request, which other work on the
machine changes little. Memory is what the plugin adds to a process that has loaded what a worker has (psutil,
prometheus_client, torch), after as many readings as fill its rings; the processor time of a reading is measured there
too, in the thread that takes it.

`--amplified 100` takes a reading every 0.05 s in place of every 5 s. All that the plugin does while a server serves is
to take readings, so whatever that costs, its hundredth is the plugin's: noise of ten percent is one of a tenth then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from guard_overhead import BODY, median_interval
from guard_toggle import Connection, RealServer, print_table

from legroom.worker.telemetry import READ_INTERVAL_S

CLIENTS, EACH = 8, 4
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
telemetry.start()
from legroom.worker.worker_memory import read
import time
time.sleep(4)
added = rss() - before
began = time.thread_time()
for _ in range(200):
    read()
print(json.dumps({"added_bytes": added, "reading_s": (time.thread_time() - began) / 200}))
"""
"""Three hundred readings fill both rings; the rest of the time passes."""


def tree_cpu_s(pid: int) -> float:
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


@dataclass
class Rounds:
    """Of one start of both servers."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {"with": [], "without": []})
    cpu_s: dict[str, float] = field(default_factory=lambda: {"with": 0.0, "without": 0.0})

    @property
    def ratios(self) -> list[float]:
        return [mine / other for mine, other in zip(self.rates["with"], self.rates["without"], strict=True)]


async def loaded(servers: dict[str, RealServer], rounds: int) -> Rounds:
    measured = Rounds()

    async def work(client: Connection) -> None:
        for _ in range(EACH):
            status, _, _ = await client.post("/v1/completions", BODY, True)
            assert status == 200

    for number in range(rounds + 2):
        for side in sorted(servers, reverse=bool(number % 2)):
            # Anew in every round: a server closes connections that wait for seconds.
            connections = [await Connection(servers[side].port).open() for _ in range(CLIENTS)]
            pid = servers[side].child.pid
            used, began = tree_cpu_s(pid), time.perf_counter()
            await asyncio.gather(*map(work, connections))
            if number >= 2:  # the first rounds warm both
                measured.rates[side].append(CLIENTS * EACH / (time.perf_counter() - began))
                measured.cpu_s[side] += tree_cpu_s(pid) - used
            for client in connections:
                client.close()
    return measured


def one_start(python: Path, port: int, rounds: int, with_first: bool, env: dict[str, str]) -> Rounds:
    flags = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "16M")
    sides = ("with", "without") if with_first else ("without", "with")
    with contextlib.ExitStack() as stack:
        servers = {
            side: RealServer(
                python, port + place, *flags, env=env | {"LEGROOM_WORKER_MEMORY": str(int(side == "with"))}
            )
            for place, side in enumerate(sides)
        }
        for server in servers.values():
            stack.enter_context(server)
        measured = asyncio.run(loaded(servers, rounds))
        # A reading that is older than three intervals is not shown, and amplified they are short.
        assert any("legroom_worker_host_rss_bytes" in servers["with"].metrics() for _ in range(50)), "no plugin"
        assert "legroom_worker_host_rss_bytes" not in servers["without"].metrics()
    return measured


def summary(starts: list[Rounds]) -> dict[str, Any]:
    ratios = [ratio for start in starts for ratio in start.ratios]
    requests = len(ratios) * CLIENTS * EACH
    cpu = {side: sum(start.cpu_s[side] for start in starts) for side in ("with", "without")}
    return {
        "requests_per_s": {
            side: statistics.median(rate for start in starts for rate in start.rates[side]) for side in cpu
        },
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratio_95": list(median_interval(ratios)),
        "throughput_ratio_of_each_start": [statistics.median(start.ratios) for start in starts],
        "cpu_ms_a_request": {side: seconds / requests * 1e3 for side, seconds in cpu.items()},
        "cpu_ratio": cpu["without"] / cpu["with"],
        "cpu_ratio_of_each_start": [start.cpu_s["without"] / start.cpu_s["with"] for start in starts],
        "rounds": len(ratios),
        "requests_a_side": requests,
    }


def plugin_alone(python: Path, paths: str) -> dict[str, float]:
    """In the median of three processes."""
    values = []
    for _ in range(3):
        env = os.environ | {"PYTHONPATH": paths, "LEGROOM_WORKER_MEMORY": "1"}
        run = subprocess.run([python, "-c", MEMORY], env=env, capture_output=True, text=True, check=True)
        values.append(json.loads(run.stdout.strip().splitlines()[-1]))
    return {name: statistics.median(value[name] for value in values) for name in values[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--amplified", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=18310)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real_vllm"))
    from tiny_models import beside_vllm

    starts: list[Rounds] = []
    with tempfile.TemporaryDirectory() as folder:
        beside = beside_vllm(Path(folder))
        telemetry = Path(beside) / "legroom/worker/telemetry.py"
        interval = f"READ_INTERVAL_S = {READ_INTERVAL_S}\n"
        assert interval in telemetry.read_text()
        telemetry.write_text(
            telemetry.read_text().replace(interval, f"READ_INTERVAL_S = {READ_INTERVAL_S / args.amplified}\n")
        )
        paths = os.pathsep.join((beside, str(Path(__file__).parent)))
        env = {"PYTHONPATH": paths, "LEGROOM_HOME": folder, "TMPDIR": folder}
        alone = plugin_alone(args.python, beside)
        print(
            f"{alone['added_bytes'] / 1e6:.1f} MB a worker, {alone['reading_s'] * 1e3:.2f} ms of processor time "
            f"a reading: {alone['reading_s'] / READ_INTERVAL_S:.3%} of one core",
            flush=True,
        )
        for number in range(args.starts):
            starts.append(one_start(args.python, args.port, args.rounds, number % 2 == 0, env))
            measured = summary(starts) | alone
            low, high = measured["throughput_ratio_95"]
            print(
                f"{number + 1} starts: throughput {measured['throughput_ratio']:.2%} ({low:.2%} to {high:.2%}), by "
                f"processor time {measured['cpu_ratio']:.2%}",
                flush=True,
            )
            if args.amplified > 1:
                ratio, low, high = (
                    1 - (1 - value) / args.amplified for value in (measured["throughput_ratio"], low, high)
                )
                print(f"  of a plugin that is not amplified: {ratio:.3%} ({low:.3%} to {high:.3%})", flush=True)
            if args.json:
                args.json.write_text(json.dumps(measured, indent=1))
    print_table(
        [
            ("", "with", "without"),
            ("requests a second", *(f"{measured['requests_per_s'][side]:.1f}" for side in ("with", "without"))),
            ("CPU a request, ms", *(f"{measured['cpu_ms_a_request'][side]:.2f}" for side in ("with", "without"))),
        ]
    )
    print("throughput of each start:", *(f"{ratio:.2%}" for ratio in measured["throughput_ratio_of_each_start"]))


if __name__ == "__main__":
    main()
