"""A week of samples of a hundred servers in the journal: how large the file is, how fast it is written and asked.

    python bench/journal_week.py [--servers 100] [--days 7] [--interval 5] [--keep FILE]

The samples are synthetic (a daily wave, noise, counters with a restart now and then) and fed as fast as the journal
takes them, hour by hour with its upkeep in between, exactly as a sidecar would over a week. Limits: 500 MB, and 100 ms
(of CPU, so that other work on the machine does not count) for each query. It takes some ten minutes.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_harness import arguments

from legroom.live.journal.journal import Journal
from legroom.live.journal.sample_store import FIELDS

LIMIT_BYTES, LIMIT_S = 500_000_000, 0.1
START_S = 1_750_000_000 // 3600 * 3600.0
HOUR_S, DAY_S = 3600, 86400


class Server:
    """One synthetic server: load that follows the day, counters that follow the load."""

    def __init__(self, number: int) -> None:
        self.name = f"http://server{number}:8000"
        self.rng = random.Random(number)
        self.phase_s = self.rng.uniform(0, DAY_S)
        self.total = dict.fromkeys(FIELDS, 0.0)
        self.started_s = START_S

    def row(self, time_s: float, step_s: float) -> tuple[float, ...]:
        rng, total = self.rng, self.total
        load = max(0.0, 0.5 + 0.4 * math.sin((time_s + self.phase_s) / DAY_S * 2 * math.pi) + rng.gauss(0, 0.08))
        if rng.random() < 1e-5:
            self.total, total, self.started_s = dict.fromkeys(FIELDS, 0.0), dict.fromkeys(FIELDS, 0.0), time_s
        finished = int(load * 20 * step_s * rng.random())
        total["finished"] += finished
        total["prompt_tokens"] += finished * rng.randint(100, 3000)
        total["generation_tokens"] += finished * rng.randint(50, 600)
        total["prefix_queries"] = total["prompt_tokens"]
        total["prefix_hits"] += finished * rng.randint(0, 900)
        total["preemptions"] += rng.random() < load * 0.05
        gauges = {
            "kv_use": min(load * 0.9 + rng.gauss(0, 0.03), 1.0),
            "running": int(load * 128),
            "num_blocks": 27000.0,
            "waiting": int(max(0.0, load - 0.8) * 100),
            "memory_used_bytes": 7.2e10 + int(load * 2e8) // 4096 * 4096,
            "process_start_s": self.started_s,
        }
        return tuple(float(gauges.get(name, total[name])) for name in FIELDS)


class Fed:
    """How far the feeding has come. CPU seconds are the journal's own: making the samples is not counted."""

    def __init__(self, servers: int) -> None:
        self.servers = [Server(number) for number in range(servers)]
        self.clock_s, self.hour = START_S, 0
        self.written, self.peak_bytes, self.spent_s = 0, 0, 0.0


def size_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.glob(f"{path.name}*"))


def timed(ask: Callable[[], object], times: int = 7) -> tuple[float, float, int]:
    """CPU seconds, as other work on the machine must not count, and seconds of the clock beside them: medians."""
    cpu_s, wall_s, answer = [], [], None
    for _ in range(times):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        answer = ask()
        cpu_s.append(time.process_time() - start_cpu_s)
        wall_s.append(time.perf_counter() - start_s)
    return statistics.median(cpu_s), statistics.median(wall_s), len(answer)  # type: ignore[arg-type]


def main() -> int:
    options = arguments(__doc__, servers=100, days=7.0, interval=5.0, keep=Path)
    with tempfile.TemporaryDirectory(prefix="legroom-week-") as folder:
        path = options.keep or Path(folder) / "journal.db"
        fed = Fed(options.servers)
        with Journal.open(path, clock=lambda: fed.clock_s) as journal:
            fill(journal, fed, options.days, options.interval)
            figures = ask(journal, fed.servers[0].name, fed.clock_s)
        written, peak_bytes, spent_s = fed.written, fed.peak_bytes, fed.spent_s
        final_bytes = size_bytes(path)
    print(f"{written:,} samples of {options.servers} servers over {options.days:g} days at {options.interval:g} s")
    print(f"{'file':44} {final_bytes / 1e6:10,.0f} MB  {final_bytes / LIMIT_BYTES:5.0%} of limit")
    share = peak_bytes / LIMIT_BYTES
    print(f"{'file at its largest, with its log':44} {peak_bytes / 1e6:10,.0f} MB  {share:5.0%} of limit")
    print(f"{'writing and upkeep':44} {written / spent_s:10,.0f} samples/s of CPU")
    for name, (cpu_s, wall_s, count) in figures.items():
        clock_ms = f"{wall_s * 1000:.0f} ms of the clock"
        print(f"{name:44} {cpu_s * 1000:10.1f} ms  {cpu_s / LIMIT_S:5.0%} of limit, {count:,} points, {clock_ms}")
    slowest_s = max(cpu_s for cpu_s, _, _ in figures.values())
    held = {
        "samples": written,
        "bytes": final_bytes,
        "peak_bytes": peak_bytes,
        "samples_per_cpu_s": round(written / spent_s),
        "queries_cpu_s": {name: round(cpu_s, 4) for name, (cpu_s, _, _) in figures.items()},
        "queries_wall_s": {name: round(wall_s, 4) for name, (_, wall_s, _) in figures.items()},
        "slowest_query_cpu_s": slowest_s,
        "limit_bytes": LIMIT_BYTES,
        "limit_query_s": LIMIT_S,
    }
    print(json.dumps(held))
    return 0 if peak_bytes <= LIMIT_BYTES and slowest_s <= LIMIT_S else 1


def fill(journal: Journal, fed: Fed, days: float, interval_s: float) -> None:
    """Everything a sidecar would write, hour by hour."""
    while fed.hour < round(days * 24):
        for minute in range(60):
            rows = []
            start_s = START_S + fed.hour * HOUR_S + minute * 60
            for at in range(round(60 / interval_s)):
                time_s = start_s + at * interval_s
                rows += [(server.name, time_s, server.row(time_s, interval_s)) for server in fed.servers]
            begin_s = time.process_time()
            journal.add_rows(rows)
            fed.spent_s += time.process_time() - begin_s
            fed.written += len(rows)
        if fed.hour % 3 == 0:
            name = fed.servers[fed.hour % len(fed.servers)].name
            number = journal.open_incident(name, "pool_pressure", "synthetic", {}, fed.clock_s)
            journal.close_incident(number, "over", fed.clock_s + 60)
        fed.clock_s = START_S + (fed.hour + 1) * HOUR_S + 150
        begin_s = time.process_time()
        journal.maintain()
        fed.spent_s += time.process_time() - begin_s
        fed.peak_bytes = max(fed.peak_bytes, size_bytes(journal.path))
        if fed.hour % 24 == 23:
            print(f"day {fed.hour // 24 + 1}: {size_bytes(journal.path) / 1e6:,.0f} MB", file=sys.stderr, flush=True)
        fed.hour += 1


def ask(journal: Journal, server: str, now_s: float) -> dict[str, tuple[float, float, int]]:
    """The questions that `watch`, `incident` and `incidents` put to it."""
    return {
        "a server's last hour, every sample": timed(lambda: journal.samples(server, now_s - HOUR_S, now_s)),
        "an hour of yesterday, every sample": timed(
            lambda: journal.samples(server, now_s - 23 * HOUR_S, now_s - 22 * HOUR_S)
        ),
        "a server's last day, by the minute": timed(lambda: journal.samples(server, now_s - DAY_S, now_s)),
        "a server's week, for a plot": timed(lambda: journal.samples(server, now_s - 7 * DAY_S, now_s)),
        "a server's week, by the minute": timed(
            lambda: journal.samples(server, now_s - 7 * DAY_S, now_s, max_points=20_000)
        ),
        "all incidents of the week": timed(lambda: journal.incidents(since_s=now_s - 7 * DAY_S)),
        "an incident with notes and actions": timed(lambda: [journal.incident(1)]),
    }


if __name__ == "__main__":
    sys.exit(main())
