#!/usr/bin/env python3
"""Goodput of a real vLLM, direct, with the guard inside and with the proxy in front, the same load in turn.

    guard_real.py VLLM_PYTHON [--rounds 5] [--loads short long ...] [--modes direct middleware proxy strict]
                  [--requests 1.0] [--blocks 33] [--flags "..."] [--json FILE]

One server with a tiny model and a pool so small that it thrashes; each load is sent at once, once a mode and round, the
modes in another order each round (`again` is direct once more: what it has is the method's own scatter). A round's
ratio is finished tokens a second over those of direct in that round. `steps` are the engine's, over those of direct for
the same tokens: other work on the machine does not change them. CPU is that of each process, in milliseconds a request.
With --json a line is added for each run as it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from guard_toggle import ROOT, Connection, RealServer, percentile, read_metrics

POLICIES = {"strict": '[pool]\nadmit = "strict"\n'}
LONGEST_RETRY_S = 30.0
PREEMPTIONS, STEPS = "vllm:num_preemptions_total", "vllm:iteration_tokens_total_count"
UNGUARDED = ("direct", "again")
GPU_MODEL = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
PREFIX = [random.Random(7).randrange(10, 200) for _ in range(400)]


def request(rnd: random.Random, prompt: int, output: int | None, copies: int = 1, prefix: int = 0) -> dict[str, Any]:
    words = PREFIX[:prefix] + [rnd.randrange(10, 200) for _ in range(prompt)]
    body: dict[str, Any] = {"model": "tiny", "prompt": words, "max_tokens": output, "temperature": 1.0}
    return body | ({"n": copies} if copies > 1 else {}) | ({} if output is None else {"ignore_eos": True})


def open_ended(rnd: random.Random, tokens: int) -> dict[str, Any]:
    """Without a max_tokens, and yet of the same length each time: the made-up weights end an answer at once."""
    return request(rnd, rnd.choice([40, 200]), None) | {"min_tokens": tokens}


LOADS: dict[str, tuple[int, Callable[[random.Random], dict[str, Any]]]] = {
    "short": (80, lambda rnd: request(rnd, 100, 40)),
    "long": (40, lambda rnd: request(rnd, 60, 700)),
    "mixed": (50, lambda rnd: request(rnd, rnd.choice([60, 300]), rnd.choice([30, 150, 600]))),
    "open-ended": (60, lambda rnd: open_ended(rnd, min(800, 1 + int(rnd.expovariate(1 / 200))))),
    "prefix": (60, lambda rnd: request(rnd, 40, 200, prefix=rnd.choice([256, 384]))),
    "several": (20, lambda rnd: request(rnd, 50, 200, copies=4)),
}
"""How many are sent at once, and what each is."""


@dataclass
class Run:
    load: str
    mode: str
    round: int
    seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    refused: int = 0
    lost: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    cpu_ms: dict[str, float] = field(default_factory=dict)
    looks: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def cpu_s(pid: int) -> float:
    """Of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(word) for task in tasks for word in task.read_text().split()]
    return own + [grandchild for child in own for grandchild in children(child)]


class Looks:
    """The server's gauges ten times a second while a load runs: what it held, and whether it had room while requests
    waited in the guard.
    """

    def __init__(self, server: RealServer, proxy_port: int | None) -> None:
        self.server, self.pages, self.stop = server, list[dict[str, float]](), threading.Event()
        self.guard_url = f"http://127.0.0.1:{proxy_port}" if proxy_port else server.url
        self.thread = threading.Thread(target=self._look)

    def __enter__(self) -> Looks:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.stop.wait(0.1):
            self.pages.append(read_metrics(self.guard_url))

    def means(self) -> dict[str, float]:
        used = [page["vllm:kv_cache_usage_perc"] for page in self.pages]
        idle = [
            1 - page["vllm:kv_cache_usage_perc"]
            for page in self.pages
            if page["legroom_guard_waiting"] and not page["vllm:num_requests_waiting"]
        ]
        running = [page["vllm:num_requests_running"] for page in self.pages]
        of_all = max(1, len(self.pages))
        return {
            "kv_use": round(statistics.mean(used or [0.0]), 3), "running": round(statistics.mean(running or [0.0]), 1),
            "free_while_held_back": round(sum(idle) / of_all, 3), "held_back": round(len(idle) / of_all, 3),
        }  # fmt: skip


class Bench:
    def __init__(self, server: RealServer, policy: Path, proxy: subprocess.Popen[bytes] | None, proxy_port: int):
        self.server, self.policy, self.proxy, self.proxy_port = server, policy, proxy, proxy_port
        self.pids = {"api": [server.child.pid], "engine": children(server.child.pid)}
        self.pids |= {"proxy": [proxy.pid]} if proxy else {}
        self.answers = 1.0
        self.look = False

    def _cpu(self) -> dict[str, float]:
        return {name: sum(cpu_s(pid) for pid in pids) for name, pids in self.pids.items()}

    async def _one(self, port: int, body: dict[str, Any], guard: bool, run: Run, latencies: list[float]) -> None:
        began = time.perf_counter()
        connection = await Connection(port).open()
        for _ in range(40):
            status, headers, answer = await connection.post("/v1/completions", body, guard)
            if status in (429, 503):
                run.refused += 1
                await asyncio.sleep(min(LONGEST_RETRY_S, float(headers.get("retry-after", "1"))))
                continue
            break
        connection.close()
        if status != 200:
            run.lost += 1
            return
        run.tokens += json.loads(answer)["usage"]["completion_tokens"]
        latencies.append(time.perf_counter() - began)

    async def run(self, load: str, mode: str, number: int, share: float) -> Run:
        run, latencies = Run(load, mode, number), list[float]()
        wanted = POLICIES.get(mode, "")
        if self.policy.read_text() != wanted:
            self.policy.write_text(wanted)
            await asyncio.sleep(1.2)
        rnd, (count, make) = random.Random(number), LOADS[load]
        bodies = [make(rnd) for _ in range(max(1, round(count * share)))]
        for body in bodies:
            if (body["max_tokens"] or 0) > 100:
                body["max_tokens"] = round(body["max_tokens"] * self.answers)
        port = self.proxy_port if mode == "proxy" else self.server.port
        guard = mode not in (*UNGUARDED, "proxy")
        before, used, began = self.server.metrics(), self._cpu(), time.perf_counter()
        looks = Looks(self.server, self.proxy_port if mode == "proxy" else None)
        with looks if self.look else contextlib.nullcontext():
            await asyncio.gather(*(self._one(port, body, guard, run, latencies) for body in bodies))
            run.seconds = round(time.perf_counter() - began, 3)
        run.looks = looks.means() if self.look else {}
        run.cpu_ms = {name: round((end - used[name]) * 1e3 / len(bodies), 2) for name, end in self._cpu().items()}
        after = self.server.metrics()
        run.preemptions, run.steps = (int(after[key] - before[key]) for key in (PREEMPTIONS, STEPS))
        run.p50_s, run.p99_s = (round(percentile(latencies or [0.0], at), 2) for at in (0.5, 0.99))
        return run


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start_proxy(python: str, upstream: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    words = [python, "-m", "legroom", "guard", "--upstream", upstream, "--port", str(port)]
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": paths}, stdout=log.open("w"), stderr=log.open("w"))
    until = time.monotonic() + 30
    while time.monotonic() < until and child.poll() is None:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            if "legroom_guard_fail_open 0" in page:
                return child
        except OSError:
            pass
        time.sleep(0.3)
    child.kill()
    sys.exit(f"the proxy did not start:\n{log.read_text()[-2000:]}")


def use_gpu(server: RealServer) -> None:
    """A model with some work to do, its steps captured as graphs, in place of one that a CPU can run."""
    config = Path(server.folder.name) / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | GPU_MODEL))
    without = {"--enforce-eager", "--dtype", "float32"}
    graphs = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
    server.words = [word for word in server.words if word not in without] + ["--compilation-config", graphs]


def table(runs: list[Run]) -> None:
    for load in dict.fromkeys(run.load for run in runs):
        direct = {run.round: run for run in runs if (run.load, run.mode) == (load, "direct")}
        for mode in dict.fromkeys(run.mode for run in runs):
            own = [run for run in runs if (run.load, run.mode) == (load, mode) and run.round in direct]
            if not own:
                continue
            ratios = [run.tokens_per_s / direct[run.round].tokens_per_s for run in own]
            cpu = {name: round(statistics.mean(run.cpu_ms[name] for run in own), 1) for name in own[0].cpu_ms}
            print(
                f"{load:11}{mode:11} rounds {len(own)}  goodput {statistics.median(ratios):.3f} "
                f"(least {min(ratios):.3f})  preemptions {sum(run.preemptions for run in own):4}  "
                f"steps {sum(run.steps for run in own) / sum(direct[run.round].steps for run in own):.3f}  "
                f"p50 {statistics.median(run.p50_s for run in own):6.2f} s  "
                f"p99 {statistics.median(run.p99_s for run in own):6.2f} s  "
                f"refused {sum(run.refused for run in own)}  lost {sum(run.lost for run in own)}  cpu ms {cpu}"
                + (f"  looks {own[-1].looks}" if own[-1].looks else ""),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--modes", nargs="+", default=["direct", "again", "middleware", "proxy"])
    parser.add_argument("--requests", type=float, default=1.0, help="times the requests of each load")
    parser.add_argument("--flags", default="--max-model-len 1024 --block-size 128 --num-gpu-blocks-override 33 "
                        "--kv-cache-memory-bytes 16M")  # fmt: skip
    parser.add_argument("--gpu", action="store_true", help="a larger model, with graphs")
    parser.add_argument("--answers", type=float, default=1.0, help="times the tokens of each answer of over 100")
    parser.add_argument("--proxy-python", default=sys.executable)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further run after so many")
    parser.add_argument("--looks", action="store_true", help="read the server's gauges ten times a second")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    until, runs = time.monotonic() + args.minutes * 60, list[Run]()
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.toml"
        policy.write_text("")
        port, proxy = free_port(), None
        with RealServer(
            args.python, free_port(), *shlex.split(args.flags), env={"LEGROOM_GUARD_POLICY": str(policy)}
        ) as server:
            try:
                if "proxy" in args.modes:
                    proxy = start_proxy(args.proxy_python, server.url, port, Path(folder) / "proxy.log")
                bench = Bench(server, policy, proxy, port)
                bench.answers, bench.look = args.answers, args.looks
                asyncio.run(bench.run(args.loads[0], "direct", 0, 0.3))  # warm
                for number in range(args.rounds):
                    modes = args.modes[number % len(args.modes) :] + args.modes[: number % len(args.modes)]
                    for load in args.loads:
                        for mode in modes:
                            if time.monotonic() > until:
                                break
                            run = asyncio.run(bench.run(load, mode, number, args.requests))
                            runs.append(run)
                            if args.json:
                                with args.json.open("a") as file:
                                    file.write(
                                        json.dumps(asdict(run) | {"tokens_per_s": round(run.tokens_per_s, 1)}) + "\n"
                                    )
            finally:
                if proxy is not None:
                    proxy.send_signal(signal.SIGTERM)
                    proxy.wait(20)
        table(runs)


if __name__ == "__main__":
    main()
