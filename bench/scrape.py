"""How many servers one process watches on one core: one command, a table and JSON.

    python bench/scrape.py [--endpoints 500] [--rounds 4]

A second process serves what a real vLLM 0.32.0 answered (tests/fixtures/live), under as many model names as there are
endpoints, each as long as a real one, 60 kB an answer, its totals moving from look to look. The watcher is pinned to
one core and does all its work: HTTP, parsing, windows filled to the brim, every detector, at an interval of five
seconds. Its share of that core is CPU time over wall time, so that other work on the machine does not count.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import resource
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_harness import arguments, print_table

from legroom.live.detectors import Watcher
from legroom.live.metrics.endpoint import Endpoint
from legroom.live.metrics.exposition import parse_sample
from legroom.live.metrics.sample import EngineSample, Histogram, Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import scrape_fleet
from legroom.live.metrics.window import MAX_STEPS

REAL = Path(__file__).parents[1] / "tests/fixtures/live/metrics_0.32.0.txt"
SIZE = 60_000
INTERVAL_S = 5.0
MOST_MB = 300
LEAST_ENDPOINTS = 500
MOVING = re.compile(
    rb"^(vllm:(?:generation_tokens|prompt_tokens|prefix_cache_queries)_total\{[^}]*\}) [0-9.e+]+$", re.M
)


def texts(count: int) -> list[bytes]:
    """One answer an endpoint, with a place for its totals; model names as long as real ones, to 60 kB."""
    real = REAL.read_bytes()
    names = real.count(b"tiny-llama")
    pad = max((SIZE - len(real)) // names, 0)
    made = []
    for number in range(count):
        name = f"acme/model-{number:05d}-instruct-fp8-dynamic"[: 10 + pad].ljust(10 + pad, "x").encode()
        made.append(MOVING.sub(rb"\1 @TOTAL@", real.replace(b"tiny-llama", name)))
    return made


class Server(asyncio.Protocol):
    """As little HTTP as a scrape needs, so that the served side costs next to nothing."""

    answers: list[list[bytes]]
    started = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        number = int(data[5 : data.index(b"/", 5)])
        total = str(int((time.monotonic() - self.started) * 100)).encode()
        body = total.join(self.answers[number])
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


def serve(count: int, pipe: Connection) -> None:
    """The other process."""
    Server.answers = [text.split(b"@TOTAL@") for text in texts(count)]

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def moved(engine: EngineSample, by: int) -> EngineSample:
    """The engine some scrapes later: totals and histograms grown."""
    totals = ("generation_tokens", "prompt_tokens", "prefix_queries", "finished")
    grown: dict[str, Any] = {name: (getattr(engine, name) or 0.0) + by * 100 for name in totals}
    for name in ("ttft", "inter_token", "e2e_latency", "queue_time", "request_prompt_tokens"):
        old: Histogram = getattr(engine, name)
        counts = tuple(count + by * (3 + place) for place, count in enumerate(old.counts))
        grown[name] = Histogram(old.bounds, counts, old.sum + by)
    return replace(engine, **grown)


def filled(server: str, sample: Sample) -> Watcher:
    """A watcher whose window is as full as it gets."""
    watcher = Watcher(server)
    start = time.time() - (MAX_STEPS + 2) * INTERVAL_S
    for number in range(MAX_STEPS + 1):
        engines = tuple(moved(engine, number) for engine in sample.engines)
        watcher.window.add(replace(sample, time_s=start + number * INTERVAL_S, server=server, engines=engines))
    return watcher


def watch(count: int, rounds: int, port: int) -> dict[str, Any]:
    """The measured process."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    targets = [Endpoint(f"http://127.0.0.1:{port}/{number}/metrics") for number in range(count)]
    sample = parse_sample(texts(1)[0].replace(b"@TOTAL@", b"1"), time.time(), "x")
    watchers = {target.server: filled(target.server, sample) for target in targets}
    seen = {"looks": 0, "failures": 0}
    marks: list[tuple[float, float, int]] = []

    def take(look: ScrapeResult) -> None:
        seen["looks"] += 1
        seen["failures"] += isinstance(look, ScrapeFailure)
        watchers[look.server].take(look)
        if seen["looks"] in (count, count * (rounds + 1)):
            marks.append((time.monotonic(), time.process_time(), seen["failures"]))

    # The first round opens connections and meets every label for the first time; it is not counted.
    asyncio.run(scrape_fleet(targets, INTERVAL_S, take, rounds=rounds + 1))
    (wall_0, cpu_0, failed_0), (wall_1, cpu_1, failed_1) = marks
    return {
        "endpoints": count,
        "rounds": rounds,
        "failures": failed_1 - failed_0,
        "failures_in_first_round": failed_0,
        "core_share": round((cpu_1 - cpu_0) / (wall_1 - wall_0), 3),
        "round_s": round((wall_1 - wall_0) / rounds, 2),
        "cpu_ms_per_look": round((cpu_1 - cpu_0) / (count * rounds) * 1000, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    args = arguments(__doc__, endpoints=LEAST_ENDPOINTS, rounds=4)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(args.endpoints, there), daemon=True)
    server.start()
    try:
        result = watch(args.endpoints, args.rounds, here.recv())
    finally:
        server.terminate()
    result["on_one_core"] = int(result["endpoints"] / result["core_share"])
    ok = result["core_share"] < 1 and result["peak_mb"] <= MOST_MB and not result["failures"]
    ok = ok and result["round_s"] < INTERVAL_S * 1.05
    titles = ("endpoints", "interval", "one core", "ms a poll", "peak MB", "failed", "would fit")
    share, polled = f"{result['core_share']:.0%}", f"{result['round_s']:.2f} s"
    figures = [result[name] for name in ("cpu_ms_per_look", "peak_mb", "failures", "on_one_core")]
    print_table([titles, (result["endpoints"], polled, share, *figures)])
    limits = {"mb": MOST_MB, "endpoints": LEAST_ENDPOINTS}
    print(json.dumps({"watch": result, "limits": limits, "ok": ok}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
