"""How long one poll of a large fleet takes through a real Prometheus, and whether memory stays flat.

    python bench/watch_fleet.py PROMETHEUS [--servers 2000] [--rounds 12] [--scrape-every 5]

PROMETHEUS is the program. It scrapes one page with the series of all servers, with the names, labels and number that a
vLLM of the release shows, and is polled every five seconds; then it is asked for the fleet's view. A poll is everything
`legroom watch --prometheus` does: queries, parsing, samples, detectors, views. Printed for each: its time, the part of
it spent waiting for answers, and the CPU that Prometheus used meanwhile, its scrapes included. The detectors' windows
are filled before, from made samples of the last ten minutes.
"""

from __future__ import annotations

import asyncio
import gc
import http.server
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_harness import arguments, free_port

from legroom.facts.metrics import metrics_of, role_of
from legroom.facts.releases import release
from legroom.live.metrics.exposition import LABELLED_ROLES, VALUE_ROLES
from legroom.live.metrics.prometheus_source import _LARGE_FLEET, _LATENCIES, PrometheusSource
from legroom.live.metrics.scrape import ScrapeFailed, open_session
from legroom.live.metrics.window import MAX_STEPS, WINDOW_S
from legroom.sidecar.watch_session import WatchSession

VERSION = "0.32.0"
APART_S = 15.0
ASKED_S = 5.0
STEPS = round(WINDOW_S / APART_S)
SERVER = ("cluster", "namespace", "pod")
LABELS = {"finished_reason": ("stop", "length", "abort"), "reason": ("capacity", "deferred")}


def names() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The series that are asked for, each with the labels that split it."""
    for metric in metrics_of(release(VERSION), "v1"):
        role = role_of(metric.series)
        if role in {**VALUE_ROLES, **LABELLED_ROLES} and not metric.hidden:
            yield metric.series, tuple(label for label in metric.labels if label in LABELS)
        elif metric.type == "histogram" and role_of(metric.name) in _LATENCIES and not metric.hidden:
            yield f"{metric.name}_sum", ()
            yield f"{metric.name}_count", ()


def values(servers: int, number: int) -> list[list[dict[str, Any]]]:
    """The series of each server in one round: most servers are half full, some are under pressure."""
    asked, each = list(names()), []
    for server in range(servers):
        labels = {
            "cluster": f"c{server % 4}",
            "namespace": f"team-{server % 10}",
            "pod": f"vllm-{server}",
            "job": "vllm",
            "instance": f"10.0.{server // 250}.{server % 250}:8000",
            "model_name": f"model-{server % 20}",
            "engine": "0",
        }
        rows: list[dict[str, Any]] = []
        for name, split in asked:
            value = _value(name, server, number)
            parts = [{split[0]: part} for part in LABELS[split[0]]] if split else [{}]
            if "cache_config" in name:
                parts = [{"num_gpu_blocks": "40000", "block_size": "16", "cache_dtype": "auto"}]
            rows += [{"metric": {"__name__": name, **labels, **part}, "value": [0, f"{value:g}"]} for part in parts]
        each.append(rows)
    return each


def _value(name: str, server: int, number: int) -> float:
    if name.endswith(("_total", "_sum", "_count")):
        return 1000 + 450 * number
    if "usage" in name:
        return 0.99 if server % 50 == 0 else 0.3 + (server + number) % 40 / 100
    if "waiting" in name:
        return 40 if server % 50 == 0 else 0
    return 12


class Answers(http.server.BaseHTTPRequestHandler):
    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@dataclass(frozen=True)
class Measured:
    """One scrape."""

    wall_s: float
    cpu_s: float
    resident_bytes: int
    steps: int
    """That are kept of all servers afterwards."""
    taken: int
    """Servers that were scraped."""
    waited_s: float
    """For answers, some of which were read meanwhile."""
    prometheus_cpu_s: float = 0.0


async def measured_poll(
    source: PrometheusSource,
    session: WatchSession,
    connections: Any,
    time_s: float,
    prometheus: psutil.Process | None = None,
) -> Measured:
    before_s = sum(prometheus.cpu_times()[:2]) if prometheus else 0.0
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    results = await source.poll(connections, time_s)
    answered_s, answered_cpu_s = time.perf_counter(), time.process_time()
    for seen in results:
        session.take(seen)
    wall_s, used_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    waited_s = answered_s - began_s - (answered_cpu_s - began_cpu_s)
    after_s = sum(prometheus.cpu_times()[:2]) if prometheus else 0.0
    gc.collect()
    steps = sum(len(watcher.window.steps) for watcher in session._watchers.values())
    resident = psutil.Process().memory_info().rss
    return Measured(wall_s, used_s, resident, steps, len(results), waited_s, after_s - before_s)


def rows_of(servers: int, number: int) -> list[tuple[dict[str, str], float]]:
    return [(row["metric"], float(row["value"][1])) for rows in values(servers, number) for row in rows]


def fill(source: PrometheusSource, session: WatchSession, servers: int) -> None:
    """Ten minutes of scrapes, up to now."""
    each = [({name: labels[name] for name in SERVER}, 1.0) for labels, _ in rows_of(servers, 0)]
    for number in range(STEPS):
        time_s = time.time() - APART_S * (STEPS - number)
        times = [(labels, time_s) for labels, _ in each]
        for seen in source._results_of_rows(rows_of(servers, number), times, each, time_s):
            session.take(seen)


def exposition(servers: int, number: int) -> bytes:
    """The same series as a page that Prometheus scrapes, the servers told apart by the labels on it."""
    lines = []
    for row in (row for rows in values(servers, number) for row in rows):
        labels = ",".join(f'{name}="{value}"' for name, value in row["metric"].items() if name != "__name__")
        lines.append(f"{row['metric']['__name__']}{{{labels}}} {row['value'][1]}\n")
    for server in range(servers):
        labels = f'cluster="c{server % 4}",namespace="team-{server % 10}",pod="vllm-{server}",instance="x",job="vllm"'
        lines.append(f"up{{{labels}}} 1\n")
    return "".join(lines).encode()


def expose(servers: int, pages: int, ready: Any) -> None:
    """One page a scrape, so that counters grow; the last one stays."""
    made = [exposition(servers, STEPS + number) for number in range(pages)]
    scrapes = iter(range(10**9))

    class Handler(Answers):
        def do_GET(self) -> None:
            body = made[min(next(scrapes), pages - 1)]
            self.answer(body, "text/plain; version=0.0.4")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        ready.send((server.server_address[1], len(made[0])))
        server.serve_forever()


@contextmanager
def scraping(program: str, target: int, folder: str, every_s: float) -> Iterator[tuple[int, psutil.Process]]:
    """A Prometheus that scrapes the page: its port and its process."""
    port = free_port()
    jobs = {"job_name": "vllm", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    every = {"scrape_interval": f"{every_s:g}s", "scrape_timeout": f"{every_s:g}s"}
    config = Path(folder) / "prometheus.yml"
    config.write_text(json.dumps({"global": every, "scrape_configs": [jobs]}))
    words = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/data",
        "--log.level=error",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = subprocess.Popen(words)
    try:
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


async def poll_real(port: int, prometheus: psutil.Process, servers: int, rounds: int) -> list[Measured]:
    """Polls in real time, once all servers have been scraped."""
    source, session = PrometheusSource(f"http://127.0.0.1:{port}"), WatchSession()
    fill(source, session, servers)
    measured: list[Measured] = []
    async with open_session() as connections:
        while len(measured) < rounds:
            try:
                now = await measured_poll(source, session, connections, time.time(), prometheus)
            except ScrapeFailed:  # it starts
                await asyncio.sleep(1.0)
                continue
            if now.taken or measured:
                measured.append(now)
            await asyncio.sleep(max(ASKED_S - now.wall_s, 0))
    return measured


def real(servers: int, rounds: int, program: str, every_s: float) -> None:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=expose, args=(servers, 8, theirs), daemon=True)
    process.start()
    target, size = mine.recv()
    try:
        with tempfile.TemporaryDirectory() as folder, scraping(program, target, folder, every_s) as (port, prometheus):
            apart_s = 15.0 if servers > _LARGE_FLEET else every_s
            shown(servers, size, apart_s, asyncio.run(poll_real(port, prometheus, servers, rounds)))
            words = [sys.executable, "-m", "legroom", "watch", "--prometheus", f"http://127.0.0.1:{port}", "--fleet"]
            began_s = time.perf_counter()
            view = subprocess.run([*words, "--over", "5m", "--json"], capture_output=True, text=True, check=False)
            took_s = time.perf_counter() - began_s
            print(f"--fleet: {took_s:.2f} s, exit code {view.returncode}, {len(view.stdout) / 1e3:.0f} kB")
    finally:
        process.terminate()
        process.join()


def shown(servers: int, size: int, apart_s: float, measured: list[Measured]) -> None:
    print(f"{servers} servers, {size / 1e6:.1f} MB with all series in an answer or a scrape")
    for number, each in enumerate(measured):
        memory = f"{each.resident_bytes / 2**20:.0f} MiB, {each.steps} steps"
        waited = f"{each.waited_s:.2f} s waited, Prometheus {each.prometheus_cpu_s:.2f} s of CPU"
        print(
            f"poll {number:2}: {each.wall_s:.2f} s ({each.cpu_s:.2f} s of CPU, {waited}), {each.taken} taken, {memory}"
        )
    for name in ("wall_s", "cpu_s", "waited_s", "prometheus_cpu_s"):
        ordered = sorted(getattr(each, name) for each in measured)
        print(f"{name}: median {ordered[len(ordered) // 2]:.2f}, longest {ordered[-1]:.2f}")
    # From the second scrape on: the first makes what every server has, whatever it keeps.
    first, last = measured[min(1, len(measured) - 1)], measured[-1]
    if last.steps > first.steps:
        each_bytes = (last.resident_bytes - first.resident_bytes) / (last.steps - first.steps)
        most = min(MAX_STEPS, round(WINDOW_S / apart_s)) * servers
        plateau = last.resident_bytes + (most - last.steps) * each_bytes
        print(f"{each_bytes:.0f} bytes a step; with the windows full ({most} steps) {plateau / 2**20:.0f} MiB")


def main() -> None:
    args = arguments(__doc__, "prometheus", servers=2000, rounds=12, scrape_every=5.0)
    real(args.servers, args.rounds, args.prometheus, args.scrape_every)


if __name__ == "__main__":
    main()
