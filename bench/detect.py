"""Are a real vLLM's troubles seen in time, and is a healthy one left in peace? One command, a table and JSON.

    python bench/detect.py [--python VLLM_PYTHON] [--port 18403] [--record FOLDER]   # five troubles, about 6 minutes
    python bench/detect.py --healthy 30 [--record FOLDER]                            # a healthy mixed load, 30 minutes

A small real vLLM (CPU, a tiny model, a pool of 24 blocks) is driven into a backlog, into preemption, into prompts
that share nothing, stopped (SIGSTOP of its engine core) and killed; in between its pool is full and nobody waits, of
which nothing may be said. It is looked at every five seconds. `visible` is
the first look whose raw figures show the trouble, told without the detectors; each must be found within three looks
of that. `--record` keeps the recordings; tests replay them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from detect_load import Client, Load, backlog, full_pool, healthy, low_hit_rate, steady, thrash

from legroom.live.detectors import Watcher
from legroom.live.metrics.recording import Recorder
from legroom.live.metrics.sample import Look, Sample, ScrapeFailure
from legroom.live.metrics.scrape import endpoint, look, open_session

ROOT = Path(__file__).parents[1]
INTERVAL_S = 5.0
WITHIN = 3
MODEL = "tiny-llama"
FLAGS = ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "16M", "--load-format", "dummy"]
ROOMY = ["--num-gpu-blocks-override", "48"]
"""Small enough that bursts of the healthy load fill it for a moment."""
SMALL = ["--num-gpu-blocks-override", "24", "--max-num-seqs", "32"]
ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def delta(now: Sample, before: Sample, name: str) -> float:
    return float((getattr(now, name) or 0) - (getattr(before, name) or 0))


def sees_backlog(now: Sample, before: Sample, first: Sample) -> bool:
    ten_seconds_of_service = delta(now, before, "finished") / (now.time_s - before.time_s) * 10
    return (now.waiting or 0) >= max(4, now.running or 0, ten_seconds_of_service)


def sees_thrash(now: Sample, before: Sample, first: Sample) -> bool:
    return delta(now, first, "preemptions") >= 3


def sees_low_hit_rate(now: Sample, before: Sample, first: Sample) -> bool:
    asked, found = delta(now, first, "prefix_queries"), delta(now, first, "prefix_hits")
    pool = now.engines[0].pool_tokens or 0
    return asked >= pool / 2 and found < 0.05 * asked and (now.kv_use or 0) >= 0.9


def sees_no_tokens(now: Sample, before: Sample, first: Sample) -> bool:
    return (now.running or 0) > 0 and delta(now, before, "generation_tokens") == 0


def sees_full_pool(now: Sample, before: Sample, first: Sample) -> bool:
    return (now.kv_use or 0) >= 0.95 and not now.waiting


@dataclass
class Trouble:
    """How to cause it, how its figures look, and what must be found; no kind: nothing must be."""

    name: str
    kind: str
    load: Load
    sees: Callable[[Sample, Sample, Sample], bool] | None
    hurt: Callable[[subprocess.Popen[bytes]], None] | None = None
    heal: Callable[[subprocess.Popen[bytes]], None] | None = None


def engine_core(server: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(
        child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    )


def signal_engine(number: int) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda server: engine_core(server).send_signal(number)


TROUBLES = (
    Trouble("backlog", "queue_backlog", backlog, sees_backlog),
    Trouble("thrash", "preemption_thrash", thrash, sees_thrash),
    Trouble("low hit rate", "prefix_cache_waste", low_hit_rate, sees_low_hit_rate),
    Trouble("full pool", "", full_pool, sees_full_pool),
    Trouble(
        "stuck engine",
        "stuck_engine",
        steady,
        sees_no_tokens,
        signal_engine(signal.SIGSTOP),
        signal_engine(signal.SIGCONT),
    ),
    Trouble("crash", "unreachable", steady, None, signal_engine(signal.SIGKILL)),
)


@dataclass
class Outcome:
    """What was seen of one trouble."""

    name: str
    kind: str
    visible_at: int | None = None
    found_at: int | None = None
    reason: str = ""
    others: list[str] = field(default_factory=list)

    @property
    def looks(self) -> int | None:
        """Looks from the first that shows it to the one it is found at, both counted."""
        if self.visible_at is None or self.found_at is None:
            return None
        return max(self.found_at - self.visible_at + 1, 0)

    @property
    def in_time(self) -> bool:
        if not self.kind:
            return self.visible_at is not None and not self.others
        return self.looks is not None and self.looks <= WITHIN


async def watch(url: str, seconds: float, take: Callable[[int, Look], bool], recorder: Recorder | None) -> None:
    """Look every interval; ends after `seconds`, or when `take` has seen enough."""
    target = endpoint(url)
    async with open_session() as session:
        start = time.monotonic()
        number = 0
        while number * INTERVAL_S < seconds:
            seen = await look(session, target)
            if recorder is not None:
                recorder.add(seen)
            if take(number, seen):
                return
            number += 1
            await asyncio.sleep(max(0.0, start + number * INTERVAL_S - time.monotonic()))


async def cause(trouble: Trouble, url: str, server: subprocess.Popen[bytes], recorder: Recorder | None) -> Outcome:
    """Bring one trouble about and watch for it for at most a minute and a half."""
    outcome = Outcome(trouble.name, trouble.kind)
    watcher = Watcher(url)
    samples: list[Sample] = []
    hurt_at = 3 if trouble.hurt else -1
    calm = 2

    async with Client(url, MODEL) as client:
        running: list[asyncio.Task[None]] = []

        def take(number: int, seen: Look) -> bool:
            if number == (0 if trouble.hurt else calm):
                running.append(asyncio.create_task(trouble.load(client)))
            findings = watcher.take(seen)
            if isinstance(seen, Sample):
                samples.append(seen)
                is_bad = (
                    trouble.sees is not None
                    and len(samples) > 1
                    and number > hurt_at
                    and trouble.sees(seen, samples[-2], samples[0])
                )
            else:
                is_bad = trouble.sees is None
            if is_bad and outcome.visible_at is None:
                outcome.visible_at = number
            for finding in findings:
                if finding.kind == trouble.kind and outcome.found_at is None:
                    outcome.found_at, outcome.reason = number, finding.reason
                elif finding.kind != trouble.kind and finding.kind not in outcome.others:
                    outcome.others.append(finding.kind)
            if number == hurt_at and trouble.hurt:
                trouble.hurt(server)
            return outcome.found_at is not None and number >= outcome.found_at + 2

        await watch(url, 100 if trouble.kind else 60, take, recorder)
        for task in running:
            task.cancel()
    if trouble.heal:
        trouble.heal(server)
    return outcome


def start_server(python: Path, port: int, model: Path, flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [
        str(python.parent / "vllm"),
        "serve",
        str(model),
        "--served-model-name",
        MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *FLAGS,
        *flags,
    ]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ENV}, start_new_session=True
        )


async def until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    async with open_session() as session:
        for _ in range(200):
            if server.poll() is not None:
                sys.exit(f"vLLM ended before it was ready:\n{log.read_text()[-2000:]}")
            if not isinstance(await look(session, endpoint(url)), ScrapeFailure):
                return
            await asyncio.sleep(1)
    sys.exit("vLLM was not ready within 200 s")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and everything it started, by its own process group."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGCONT)
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


async def all_troubles(arguments: argparse.Namespace, model: Path, folder: Path) -> list[Outcome]:
    url = f"http://127.0.0.1:{arguments.port}"
    log = folder / "server.log"
    server = start_server(arguments.python, arguments.port, model, SMALL, log)
    outcomes = []
    try:
        await until_ready(url, server, log)
        for trouble in TROUBLES:
            recorder = recording(arguments.record, trouble.name)
            outcome = await cause(trouble, url, server, recorder)
            if recorder is not None:
                recorder.close()
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.reason or 'nothing found'}", file=sys.stderr)
            if trouble is not TROUBLES[-1]:
                await until_idle(url)
    finally:
        stop(server)
    return outcomes


async def until_idle(url: str) -> None:
    """The load before has gone: nothing runs, nothing waits."""
    async with open_session() as session:
        for _ in range(60):
            seen = await look(session, endpoint(url))
            if isinstance(seen, Sample) and not seen.running and not seen.waiting:
                return
            await asyncio.sleep(1)


def recording(folder: Path | None, name: str) -> Recorder | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return Recorder(folder / f"{name.replace(' ', '_')}.jsonl.zst")


async def healthy_load(arguments: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    url = f"http://127.0.0.1:{arguments.port}"
    log = folder / "server.log"
    server = start_server(arguments.python, arguments.port, model, ROOMY, log)
    watcher = Watcher(url)
    found: list[str] = []
    counts = [0]

    def take(number: int, seen: Look) -> bool:
        counts[0] += 1
        found.extend(f"look {number}: {finding.reason}" for finding in watcher.take(seen))
        return False

    try:
        await until_ready(url, server, log)
        recorder = recording(arguments.record, "healthy")
        async with Client(url, MODEL) as client:
            load = asyncio.create_task(healthy(client))
            await watch(url, arguments.healthy * 60, take, recorder)
            load.cancel()
            answered = client.done
        if recorder is not None:
            recorder.close()
    finally:
        stop(server)
    return {"minutes": arguments.healthy, "looks": counts[0], "answered": answered, "findings": found}


def tiny_model(folder: Path) -> Path:
    """The tests' tiny model."""
    sys.path.insert(0, str(ROOT / "tests/real_vllm"))
    from tiny_models import write_model

    return Path(write_model(folder / "tiny"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--python", type=Path, default=Path(os.environ.get("LEGROOM_VLLM_PYTHON", ROOT / ".vllm/bin/python"))
    )
    parser.add_argument("--port", type=int, default=18403)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--healthy", type=float, metavar="MINUTES")
    arguments = parser.parse_args()
    if not arguments.python.exists():
        sys.exit("no real vLLM here: run bin/setup-vllm, or name its Python with --python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or tiny_model(folder)
        if arguments.healthy:
            result = asyncio.run(healthy_load(arguments, model, folder))
            print(
                f"{result['looks']} looks at a healthy load of {result['minutes']:g} min "
                f"({result['answered']} requests): {len(result['findings'])} findings"
            )
            print(json.dumps(result))
            sys.exit(1 if result["findings"] else 0)
        outcomes = asyncio.run(all_troubles(arguments, model, folder))
    print(f"{'trouble':14} {'found as':20} {'visible':>8} {'found':>6} {'looks':>6}  reason")
    for one in outcomes:
        print(f"{one.name:14} {one.kind:20} {one.visible_at!s:>8} {one.found_at!s:>6} {one.looks!s:>6}  {one.reason}")
    rows = [
        {
            "name": o.name,
            "kind": o.kind,
            "visible_at": o.visible_at,
            "found_at": o.found_at,
            "looks": o.looks,
            "in_time": o.in_time,
            "also": o.others,
        }
        for o in outcomes
    ]
    print(
        json.dumps(
            {
                "interval_s": INTERVAL_S,
                "within_looks": WITHIN,
                "all_in_time": all(o.in_time for o in outcomes),
                "rows": rows,
            }
        )
    )
    sys.exit(0 if all(one.in_time for one in outcomes) else 1)


if __name__ == "__main__":
    main()
