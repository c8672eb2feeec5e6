"""A small real vLLM (CPU, a tiny model, a pool of 24 blocks) driven into one incident after the other.

A backlog, preemption, prompts that share nothing, a stopped engine core (SIGSTOP) and a crash; in between the pool is
full while nothing waits, which is healthy. `visible_at` is the first sample whose raw figures show the incident,
computed without the detectors.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from client_loads import Client, Load, backlog, full_pool, low_hit_rate, steady, thrash

from legroom.live.detectors import Watcher
from legroom.live.metrics.endpoint import endpoint
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import open_session, scrape_result
from legroom.live.metrics.scrape_recording import Recorder

INTERVAL_S = 5.0
WITHIN = 3
MODEL = "tiny-llama"
FLAGS = ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "16M", "--load-format", "dummy"]
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
class Incident:
    """How to cause it, how its figures look, and what must be found; no kind: nothing must be."""

    name: str
    kind: str
    load: Load
    sees: Callable[[Sample, Sample, Sample], bool] | None
    inject: Callable[[subprocess.Popen[bytes]], None] | None = None
    undo: Callable[[subprocess.Popen[bytes]], None] | None = None


def engine_core(server: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(
        child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    )


def signal_engine(number: int) -> Callable[[subprocess.Popen[bytes]], None]:
    return lambda server: engine_core(server).send_signal(number)


INCIDENTS = (
    Incident("backlog", "queue_backlog", backlog, sees_backlog),
    Incident("thrash", "preemption_thrash", thrash, sees_thrash),
    Incident("low hit rate", "prefix_cache_waste", low_hit_rate, sees_low_hit_rate),
    Incident("full pool", "", full_pool, sees_full_pool),
    Incident(
        "stuck engine",
        "stuck_engine",
        steady,
        sees_no_tokens,
        signal_engine(signal.SIGSTOP),
        signal_engine(signal.SIGCONT),
    ),
    Incident("crash", "unreachable", steady, None, signal_engine(signal.SIGKILL)),
)


@dataclass
class Outcome:
    """What was seen of one incident."""

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


async def watch(url: str, seconds: float, take: Callable[[int, ScrapeResult], bool], recorder: Recorder | None) -> None:
    """Look every interval; ends after `seconds`, or when `take` has seen enough."""
    target = endpoint(url)
    async with open_session() as session:
        start = time.monotonic()
        number = 0
        while number * INTERVAL_S < seconds:
            seen = await scrape_result(session, target)
            if recorder is not None:
                recorder.add(seen)
            if take(number, seen):
                return
            number += 1
            await asyncio.sleep(max(0.0, start + number * INTERVAL_S - time.monotonic()))


async def cause(incident: Incident, url: str, server: subprocess.Popen[bytes], recorder: Recorder | None) -> Outcome:
    """Bring one incident about and watch for it for at most a minute and a half."""
    outcome = Outcome(incident.name, incident.kind)
    watcher = Watcher(url)
    samples: list[Sample] = []
    inject_at = 3 if incident.inject else -1
    calm = 2

    async with Client(url, MODEL) as client:
        running: list[asyncio.Task[None]] = []

        def take(number: int, seen: ScrapeResult) -> bool:
            if number == (0 if incident.inject else calm):
                running.append(asyncio.create_task(incident.load(client)))
            findings = watcher.take(seen)
            if isinstance(seen, Sample):
                samples.append(seen)
                is_bad = (
                    incident.sees is not None
                    and len(samples) > 1
                    and number > inject_at
                    and incident.sees(seen, samples[-2], samples[0])
                )
            else:
                is_bad = incident.sees is None
            if is_bad and outcome.visible_at is None:
                outcome.visible_at = number
            for finding in findings:
                if finding.kind == incident.kind and outcome.found_at is None:
                    outcome.found_at, outcome.reason = number, finding.reason
                elif finding.kind != incident.kind and finding.kind not in outcome.others:
                    outcome.others.append(finding.kind)
            if number == inject_at and incident.inject:
                incident.inject(server)
            return outcome.found_at is not None and number >= outcome.found_at + 2

        await watch(url, 100 if incident.kind else 60, take, recorder)
        for task in running:
            task.cancel()
    if incident.undo:
        incident.undo(server)
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
            if not isinstance(await scrape_result(session, endpoint(url)), ScrapeFailure):
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


async def provoke_all(python: Path, port: int, model: Path, folder: Path) -> list[Outcome]:
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    server = start_server(python, port, model, SMALL, log)
    outcomes = []
    try:
        await until_ready(url, server, log)
        for incident in INCIDENTS:
            recorder = recording(folder / "recordings", incident.name)
            outcome = await cause(incident, url, server, recorder)
            if recorder is not None:
                recorder.close()
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.reason or 'nothing found'}", file=sys.stderr)
            if incident is not INCIDENTS[-1]:
                await until_idle(url)
    finally:
        stop(server)
    return outcomes


async def until_idle(url: str) -> None:
    """The load before has gone: nothing runs, nothing waits."""
    async with open_session() as session:
        for _ in range(60):
            seen = await scrape_result(session, endpoint(url))
            if isinstance(seen, Sample) and not seen.running and not seen.waiting:
                return
            await asyncio.sleep(1)


def recording(folder: Path, name: str) -> Recorder:
    folder.mkdir(parents=True, exist_ok=True)
    return Recorder(folder / f"{name.replace(' ', '_')}.jsonl.zst")
