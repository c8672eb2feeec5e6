"""Search the flags that hold a load: replay the trace under many settings and compare."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.simulation.fast.columns import StepCost
from legroom.simulation.fast.jit import is_compiled_before, numba_is_installed
from legroom.simulation.replay import ReplayEngine, simulate
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.timeline import Timeline, percentile
from legroom.simulation.trace import Trace

SEARCHED: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (8, 16, 32, 64, 128, 256, 512),
    "max_num_batched_tokens": (2048, 4096, 8192, 16384, 32768),
    "block_size": (16, 32),
    "enable_prefix_caching": (True, False),
    "enable_chunked_prefill": (True, False),
}
"""280 settings, less those that vLLM refuses (without chunked prefill a prompt must fit in a step).

Flags that the user gives are not searched.
"""


@dataclass(frozen=True)
class Candidate:
    flags: dict[str, Any]
    settings: SchedulerSettings
    cost: StepCost | None = None


@dataclass(frozen=True)
class ReplayOutcome:
    """What a setting does to the load. Waits are seconds, or steps where the trace counts steps."""

    flags: dict[str, Any]
    num_blocks: int
    finished: int
    rejected: int
    preemptions: int
    throughput: float
    """Output tokens a second, or a step."""
    first_token_p99: float
    latency_p99: float
    peak_share: float
    hit_ratio: float

    def as_json(self) -> dict[str, Any]:
        """The row of a frontier."""
        return {
            "flags": self.flags, "num_blocks": self.num_blocks, "finished": self.finished, "rejected": self.rejected,
            "preemptions": self.preemptions, "throughput": round(self.throughput, 3),
            "first_token_p99": round(self.first_token_p99, 4), "latency_p99": round(self.latency_p99, 4),
            "peak_ratio": round(self.peak_share, 4), "hit_ratio": round(self.hit_ratio, 4),
        }  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """What counts as holding the load."""

    most_preemptions: int = 0
    first_token_p99: float | None = None
    latency_p99: float | None = None

    def is_met(self, outcome: ReplayOutcome) -> bool:
        """Whether this setting is good enough to be chosen."""
        return (
            outcome.preemptions <= self.most_preemptions
            and (self.first_token_p99 is None or outcome.first_token_p99 <= self.first_token_p99)
            and (self.latency_p99 is None or outcome.latency_p99 <= self.latency_p99)
        )


@dataclass(frozen=True)
class Choice:
    """The best setting, those that beat it in something, and how many were tried."""

    best: ReplayOutcome | None
    frontier: list[ReplayOutcome]
    outcomes: list[ReplayOutcome] = field(repr=False)
    in_seconds: bool
    interrupted: bool = False
    """Not all settings were tried."""

    def as_json(self) -> dict[str, Any]:
        """The document of `legroom simulate --choose --json`."""
        return {
            "tried": len(self.outcomes),
            "unit": "s" if self.in_seconds else "steps",
            "chosen": self.best.as_json() if self.best else None,
            "frontier": [outcome.as_json() for outcome in self.frontier],
            "interrupted": self.interrupted,
        }


def grid(given: Iterable[str], searched: dict[str, tuple[Any, ...]] | None = None) -> Iterator[dict[str, Any]]:
    """Every combination of the flags that were not given."""
    free = {name: values for name, values in (searched or SEARCHED).items() if name not in set(given)}
    combinations: list[dict[str, Any]] = [{}]
    for name, values in free.items():
        combinations = [{**flags, name: value} for flags in combinations for value in values]
    yield from combinations


def choose(
    trace: Trace,
    candidates: Sequence[Candidate],
    goal: Goal,
    *,
    workers: int | None = None,
    runner: Literal["processes", "ray"] = "processes",
    progress: Callable[[float], None] | None = None,
) -> Choice:
    """Replay every candidate and pick the one with the best throughput among those that meet the goal."""
    if not candidates:
        raise LegroomError("no setting is left to try", "give fewer flags, or a larger pool")
    trace = trace.checked()
    engine: ReplayEngine = "auto"
    if numba_is_installed() and is_compiled_before():
        engine = "compiled"
    run = _on_ray if runner == "ray" else _on_processes
    outcomes: list[ReplayOutcome] = []
    try:
        for outcome in run(trace, candidates, engine, workers):
            outcomes.append(outcome)
            if progress:
                progress(len(outcomes) / len(candidates))
    except KeyboardInterrupt:
        if not outcomes:
            raise
    good = [outcome for outcome in outcomes if goal.is_met(outcome)]
    best = max(good, key=_rank) if good else None
    return Choice(best, frontier(outcomes), outcomes, trace.in_seconds, len(outcomes) < len(candidates))


def _rank(outcome: ReplayOutcome) -> tuple[float, ...]:
    # Throughputs within a percent count as equal: then the shorter waits win.
    return (outcome.finished, round(outcome.throughput, 2 - len(str(int(outcome.throughput)))), -outcome.latency_p99,
            -outcome.first_token_p99)  # fmt: skip


def frontier(outcomes: Sequence[ReplayOutcome]) -> list[ReplayOutcome]:
    """Outcomes that no other one beats in throughput, wait for the first token and preemptions alike."""
    kept: list[ReplayOutcome] = []
    for outcome in sorted(outcomes, key=lambda o: (-o.finished, o.preemptions, -o.throughput, o.first_token_p99)):
        if not any(_beats(other, outcome) for other in kept):
            kept.append(outcome)
    return kept


def _beats(rival: ReplayOutcome, other: ReplayOutcome) -> bool:
    return (
        rival.finished >= other.finished
        and rival.preemptions <= other.preemptions
        and rival.throughput >= other.throughput
        and rival.first_token_p99 <= other.first_token_p99
    )


def outcome_of(flags: dict[str, Any], timeline: Timeline) -> ReplayOutcome:
    settings, tally = timeline.settings, timeline.tally
    if timeline.clocks is not None:
        seconds = timeline.seconds
        throughput, waits, latencies = timeline.output_tokens_per_s, seconds["first_token_s"], seconds["latency_s"]
    else:
        throughput = timeline.output_tokens / max(1, timeline.last_step)
        waits = [float(wait) for wait in timeline.first_token_wait_steps]
        latencies = [float(wait) for wait in timeline.latency_steps]
    return ReplayOutcome(
        flags, settings.num_blocks, tally.finished, len(timeline.rejections), tally.preemptions, throughput,
        percentile(waits, 0.99), percentile(latencies, 0.99), tally.peak_blocks / settings.usable_blocks,
        timeline.hit_ratio,
    )  # fmt: skip


def try_one(trace: Trace, candidate: Candidate, engine: ReplayEngine) -> ReplayOutcome:
    """Replay one setting. Half a replay is no outcome."""
    timeline = simulate(trace, candidate.settings, cost=candidate.cost, engine=engine)
    if timeline.interrupted:
        raise KeyboardInterrupt
    return outcome_of(candidate.flags, timeline)


_shared: dict[str, Any] = {}


def _remember(trace: Trace, engine: ReplayEngine) -> None:
    # Ctrl-C reaches every process of the terminal: the one that collects the outcomes decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shared.update(trace=trace, engine=engine)


def _try_shared(candidate: Candidate) -> ReplayOutcome:
    return try_one(_shared["trace"], candidate, _shared["engine"])


def _on_processes(
    trace: Trace, candidates: Sequence[Candidate], engine: ReplayEngine, workers: int | None
) -> Iterator[ReplayOutcome]:
    workers = min(workers or os.cpu_count() or 1, len(candidates))
    if workers == 1:
        yield from (try_one(trace, candidate, engine) for candidate in candidates)
        return
    with ProcessPoolExecutor(workers, initializer=_remember, initargs=(trace, engine)) as pool:
        yield from pool.map(_try_shared, candidates)


def _on_ray(
    trace: Trace, candidates: Sequence[Candidate], engine: ReplayEngine, workers: int | None
) -> Iterator[ReplayOutcome]:
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
    except ImportError:
        raise LegroomError("--engine ray needs the package ray", "pip install 'legroom[ray]'") from None
    if not ray.is_initialized():
        ray.init(num_cpus=workers, log_to_driver=False)
    shared = ray.put(trace)
    remote = ray.remote(try_one)
    for task in [remote.remote(shared, candidate, engine) for candidate in candidates]:
        yield ray.get(task)
