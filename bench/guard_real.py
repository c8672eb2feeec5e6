#!/usr/bin/env python3
"""Goodput of a real vLLM, direct, with the guard inside and with the proxy in front, the same load in turn.

    guard_real.py VLLM_PYTHON [--rounds 5] [--loads short long ...] [--modes direct middleware proxy strict]
                  [--requests 1.0] [--flags "..."] [--json FILE]
    guard_real.py VLLM_PYTHON --gpu [--model FOLDER] ...

One server with a tiny model and a pool so small that it thrashes; each load is sent at once, once a mode and round, the
modes in another order each round (`again` is direct once more). A load has the same lengths in each round and never the
same prompts, so the spread of direct over the rounds is the method's own. A round's ratio is finished tokens a second
over those of direct in that round. `steps` are the engine's, over those of direct for the same tokens: other work on
the machine does not change them. CPU is that of each process, in milliseconds a request. With --gpu the model has 8
billion parameters, steps are graphs, and the loads and the pool are those of guard_loads.py. With --json a line is
added for each run as it ends. --requests multiplies
those of each load; no run starts after --minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_harness import ROOT, arguments, cpu_s, free_port, percentile, write_line
from guard_loads import CARD_LOADS, CARD_POOL, LoadRequest
from guard_toggle import Connection, RealServer

POLICIES = {"strict": '[pool]\nadmit = "strict"\n'}
LONGEST_RETRY_S = 30.0
PREEMPTIONS, STEPS = "vllm:num_preemptions_total", "vllm:iteration_tokens_total_count"
UNGUARDED = ("direct", "again")
GPU_MODEL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
"""The shape of Llama 3.1 8B."""
CPU_FLAGS = "--max-model-len 1024 --block-size 128 --num-gpu-blocks-override 33 --kv-cache-memory-bytes 16M"
GPU_FLAGS = (
    f"--max-model-len 1024 --block-size {CARD_POOL[1]} --num-gpu-blocks-override {CARD_POOL[0] + 1} "
    "--gpu-memory-utilization 0.3 --max-num-seqs 256"
)
STOP_ID = 5
PREFIX = [random.Random(7).randrange(10, 200) for _ in range(400)]


def open_ended(rnd: random.Random) -> LoadRequest:
    return LoadRequest(rnd.choice([40, 200]), min(800, 1 + int(rnd.expovariate(1 / 200))), is_open=True)


def prefixed(rnd: random.Random) -> LoadRequest:
    prefix = rnd.choice([256, 384])
    return LoadRequest(prefix + 40, 200, prefix=prefix)


LOADS: dict[str, tuple[int, Callable[[random.Random], LoadRequest]]] = {
    "short": (80, lambda rnd: LoadRequest(100, 40)),
    "long": (40, lambda rnd: LoadRequest(60, 700)),
    "mixed": (50, lambda rnd: LoadRequest(rnd.choice([60, 300]), rnd.choice([30, 150, 600]))),
    "open-ended": (60, open_ended),
    "prefix": (60, prefixed),
    "several": (20, lambda rnd: LoadRequest(50, 200, copies=4)),
}
"""How many are sent at once, and what each is."""


def body_of(sent: LoadRequest, rnd: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "temperature": 1.0}
    if sent.is_open:
        # Without a max_tokens (which only a chat may lack), and yet of the same length each time: the first token that
        # may end it does.
        text = "".join(rnd.choices(string.ascii_lowercase, k=sent.prompt))
        ends = {"min_tokens": sent.output, "stop_token_ids": [STOP_ID], "logit_bias": {str(STOP_ID): 100}}
        return body | {"messages": [{"role": "user", "content": text}]} | ends
    ids = PREFIX[: sent.prefix] + [rnd.randrange(10, 200) for _ in range(sent.prompt - sent.prefix)]
    copies = {"n": sent.copies} if sent.copies > 1 else {}
    return body | {"prompt": ids, "max_tokens": sent.output, "ignore_eos": True} | copies


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

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(word) for task in tasks for word in task.read_text().split()]
    return own + [grandchild for child in own for grandchild in children(child)]


class Bench:
    def __init__(self, server: RealServer, policy: Path, proxies: dict[str, int]) -> None:
        self.server, self.policy, self.proxies = server, policy, proxies
        self.pids = {"api": [server.child.pid], "engine": children(server.child.pid)}
        self.loads = LOADS

    def _cpu(self) -> dict[str, float]:
        return {name: sum(cpu_s(pid) for pid in pids) for name, pids in self.pids.items()}

    async def _one(self, port: int, body: dict[str, Any], guard: bool, run: Run, latencies: list[float]) -> None:
        began = time.perf_counter()
        connection = await Connection(port).open()
        for _ in range(40):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            status, headers, answer = await connection.post(path, body, guard)
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
        count, make = self.loads[load]
        lengths, rnd = random.Random(load), random.Random(f"{load} {mode} {number}")
        sent = [make(lengths) for _ in range(max(1, round(count * share)))]
        bodies = [body_of(one, rnd) for one in sent]
        port = self.proxies.get(mode, self.server.port)
        guard = mode not in (*UNGUARDED, *self.proxies)
        before, used, began = self.server.metrics(), self._cpu(), time.perf_counter()
        await asyncio.gather(*(self._one(port, body, guard, run, latencies) for body in bodies))
        run.seconds = round(time.perf_counter() - began, 3)
        run.cpu_ms = {name: round((end - used[name]) * 1e3 / len(bodies), 2) for name, end in self._cpu().items()}
        after = self.server.metrics()
        run.preemptions, run.steps = (int(after[key] - before[key]) for key in (PREEMPTIONS, STEPS))
        run.p50_s, run.p99_s = (round(percentile(latencies or [0.0], at), 2) for at in (0.5, 0.99))
        return run


def start_proxy(python: str, upstream: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    words = [python, "-m", "legroom", "guard", "--upstream", upstream, "--port", str(port)]
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": paths}, stdout=log.open("w"), stderr=log.open("w"))
    until = time.monotonic() + 30
    while time.monotonic() < until and child.poll() is None:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            if "legroom_guard_fail_open 0.0" in page:
                return child
        except OSError:
            pass
        time.sleep(0.3)
    child.kill()
    sys.exit(f"the proxy did not start:\n{log.read_text()[-2000:]}")


def use_gpu(server: RealServer, model: str) -> None:
    """A model with some work to do, its steps captured as graphs, in place of one that a CPU can run."""
    folder = Path(server.folder.name) / "tiny"
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | GPU_MODEL))
    without = {"--enforce-eager", "--dtype", "float32"}
    server.words = [word for word in server.words if word not in without]
    if model:
        server.words[server.words.index(str(folder))] = model


def table(runs: list[Run]) -> None:
    for load in dict.fromkeys(run.load for run in runs):
        direct = {run.round: run for run in runs if (run.load, run.mode) == (load, "direct")}
        for mode in dict.fromkeys(run.mode for run in runs):
            own = [run for run in runs if (run.load, run.mode) == (load, mode) and run.round in direct]
            if not own:
                continue
            ratios = [run.tokens_per_s / direct[run.round].tokens_per_s for run in own]
            typical = statistics.median(run.tokens_per_s for run in own)
            spread = "-".join(f"{edge(run.tokens_per_s for run in own) / typical:.3f}" for edge in (min, max))
            cpu = {name: round(statistics.mean(run.cpu_ms[name] for run in own), 1) for name in own[0].cpu_ms}
            print(
                f"{load:11}{mode:11} rounds {len(own)}  goodput {statistics.median(ratios):.3f} "
                f"(least {min(ratios):.3f}, own spread {spread})  preemptions {sum(run.preemptions for run in own):4}  "
                f"steps {sum(run.steps for run in own) / sum(direct[run.round].steps for run in own):.3f}  "
                f"p50 {statistics.median(run.p50_s for run in own):6.2f} s  "
                f"p99 {statistics.median(run.p99_s for run in own):6.2f} s  "
                f"refused {sum(run.refused for run in own)}  lost {sum(run.lost for run in own)}  cpu ms {cpu}",
                flush=True,
            )


def turns(args: Namespace) -> Iterator[tuple[int, str, str]]:
    """Round, load and mode of each run."""
    for number in range(args.rounds):
        modes = args.modes[number % len(args.modes) :] + args.modes[: number % len(args.modes)]
        yield from ((number, load, mode) for load in args.loads for mode in modes)


def measure(bench: Bench, args: Namespace, until: float) -> list[Run]:
    runs: list[Run] = []
    for load in args.loads:
        asyncio.run(bench.run(load, "direct", -1, 0.15 * args.requests))  # warm
    for number, load, mode in turns(args):
        if time.monotonic() > until:
            break
        runs.append(run := asyncio.run(bench.run(load, mode, number, args.requests)))
        if args.json:
            write_line(args.json, asdict(run) | {"tokens_per_s": round(run.tokens_per_s, 1)})
    return runs


def main() -> None:
    modes = ("direct", "again", "middleware", "proxy")
    length = {"loads": tuple(LOADS), "modes": modes, "rounds": 5, "requests": 1.0, "minutes": 60.0}
    server_options = {"flags": "", "gpu": False, "model": "", "proxy_python": sys.executable}
    args = arguments(__doc__, "python:path", **length, **server_options, json=Path)
    until = time.monotonic() + args.minutes * 60
    flags = shlex.split(args.flags or (GPU_FLAGS if args.gpu else CPU_FLAGS))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        policy = Path(folder) / "policy.toml"
        policy.write_text("[requests]\nmax_output_tokens = 0\n")
        server = RealServer(args.python, free_port(), *flags, env={"LEGROOM_GUARD_POLICY": str(policy)})
        if args.gpu:
            use_gpu(server, args.model)
        stack.enter_context(server)
        bench = Bench(server, policy, {"proxy": free_port()} if "proxy" in args.modes else {})
        for mode, port in bench.proxies.items():
            child = start_proxy(args.proxy_python, server.url, port, Path(folder) / f"{mode}.log")
            stack.callback(child.wait, 20)
            stack.callback(child.send_signal, signal.SIGTERM)
            bench.pids[mode] = [child.pid]
        bench.loads = CARD_LOADS if args.gpu else LOADS
        table(measure(bench, args, until))


if __name__ == "__main__":
    main()
