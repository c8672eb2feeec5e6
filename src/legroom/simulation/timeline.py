"""The result of a replay: totals, the steps and times of every request, and the pool's use over time."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import MutableSequence, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from operator import add
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from legroom.records import dataclass, field
from legroom.simulation.fast.rows import MAX_SAMPLES
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace import Trace


class ScheduledStep(NamedTuple):
    """One step in which something was scheduled, as vLLM's scheduler reports it."""

    step: int
    scheduled: dict[str, int]
    preempted: list[str]
    finished: list[str]
    running: int
    waiting: int
    free_blocks: int

    def as_json(self) -> dict[str, Any]:
        """The line of a `--timeline` file."""
        return self._asdict()


class PoolSample(NamedTuple):
    """Maxima of the pool's use over some steps."""

    step: int
    used_blocks: int
    running: int
    waiting: int
    preemptions: int = 0
    """Since the start of the replay."""


class Rejection(NamedTuple):
    """A request that vLLM would not serve."""

    id: str
    why: str


def admissible_requests(trace: Trace, settings: SchedulerSettings) -> tuple[array[int], list[Rejection]]:
    """(per request 1 if it can be served, else 0; the rejections of the others with their reasons)."""
    accepted = array("b", bytes([1]) * len(trace))
    rejections: list[Rejection] = []
    longest = settings.max_model_len
    most = max(map(add, trace.prompt_lens, trace.output_lens))
    # The V0 engine accepts a request and ignores it once it has outgrown the pool.
    always_fits = settings.engine == "V0"
    if most <= longest and (always_fits or settings.max_blocks_of(most - 1, 1) <= settings.usable_blocks):
        return accepted, rejections
    for i, (prompt_len, output_len) in enumerate(zip(trace.prompt_lens, trace.output_lens, strict=True)):
        if prompt_len + output_len > longest:
            why = f"{prompt_len} + {output_len} tokens exceed max-model-len {longest}"
        elif not always_fits and settings.max_blocks_of(prompt_len, output_len) > settings.usable_blocks:
            needed = settings.max_blocks_of(prompt_len, output_len)
            why = f"needs {needed} blocks at its longest, the pool has {settings.usable_blocks}"
        else:
            continue
        accepted[i] = 0
        rejections.append(Rejection(trace.id_of(i), why))
    return accepted, rejections


@dataclass
class Tally:
    """Totals of a replay."""

    steps: int = 0
    preemptions: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens of admitted prompts."""
    cached_tokens: int = 0
    finished: int = 0
    peak_blocks: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    held_slot_steps: int = 0
    stored_token_steps: int = 0


@dataclass
class Clocks:
    """Times in seconds per request, in the order of arrival; 0 where an event did not happen."""

    sched_s: MutableSequence[float]
    token_s: MutableSequence[float]
    finish_s: MutableSequence[float]

    @classmethod
    def of(cls, count: int) -> Clocks:
        """Clocks of `count` requests, all at 0 seconds."""
        return cls(*(array("d", bytes(8 * count)) for _ in range(3)))


Wait = Literal["queue", "first_token", "latency"]
"""From the arrival of a request until it is first scheduled, has its first token, or has its last."""
WAITS: tuple[Wait, ...] = get_args(Wait)


@dataclass
class Timeline:
    settings: SchedulerSettings
    trace: Trace
    tally: Tally
    first_sched_steps: Sequence[int]
    first_token_steps: Sequence[int]
    finish_steps: Sequence[int]
    preemption_counts: Sequence[int]
    """Per request, in the order of arrival; -1 where it did not happen."""
    arrival_steps: Sequence[int]
    """Where the trace has seconds, the steps in which requests were first scheduled."""
    samples: list[PoolSample] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    clocks: Clocks | None = None
    """Set where the trace has arrivals in seconds."""
    interrupted: bool = False
    last_step: int = 0

    def wait_steps(self, name: Wait) -> array[int]:
        """All waits of this kind, sorted, in steps; for a trace in seconds, seconds over the mean step time."""
        if self.clocks is None:
            ends = {"queue": self.first_sched_steps, "first_token": self.first_token_steps}.get(name, self.finish_steps)
            waits = zip(ends, self.arrival_steps, strict=True)
            return array("q", sorted(end - start for end, start in waits if end >= 0))
        step_s = self.makespan_s / max(1, self.tally.steps)
        return array("q", (round(wait / step_s) if step_s else 0 for wait in self.seconds[f"{name}_s"]))

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Sorted queue, first-token and total latencies in seconds, by name; empty if the trace counts steps."""
        clocks, arrivals = self.clocks, self.trace.arrivals
        if clocks is None:
            return {}
        return {
            name: sorted(
                float(at - arrival) for at, arrival, step in zip(times, arrivals, reached, strict=True) if step >= 0
            )
            for name, times, reached in (
                ("queue_s", clocks.sched_s, self.first_sched_steps),
                ("first_token_s", clocks.token_s, self.first_token_steps),
                ("latency_s", clocks.finish_s, self.finish_steps),
            )
        }

    @property
    def makespan_s(self) -> float:
        """Seconds from the first arrival to the last token; 0 where the trace counts steps."""
        if self.clocks is None or not self.tally.finished:
            return 0.0
        return float(max(self.clocks.finish_s)) - self.trace.arrivals[0]

    @property
    def requests_per_s(self) -> float:
        """The mean rate of arrivals; of users, the rate at which they sent requests."""
        answers = self.seconds["latency_s"] if self.trace.users else ()
        return self.trace.users.rate(fmean(answers)) if self.trace.users and answers else self.trace.requests_per_s

    @property
    def output_tokens(self) -> int:
        """Output tokens of the finished requests."""
        return sum(
            output_len for output_len, step in zip(self.trace.output_lens, self.finish_steps, strict=True) if step >= 0
        )

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens per second over the makespan; 0 where the trace counts steps."""
        return self.output_tokens / self.makespan_s if self.makespan_s > 0 else 0.0

    @property
    def wasted_slot_ratio(self) -> float:
        """The share (0 to 1) of allocated token slots without a token, averaged over steps (fragmentation)."""
        slots = self.tally.held_slot_steps
        return (slots - self.tally.stored_token_steps) / slots if slots else 0.0

    @property
    def hit_ratio(self) -> float:
        """The share (0 to 1) of prompt tokens that the prefix cache held."""
        return self.tally.cached_tokens / self.tally.prompt_tokens if self.tally.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """The document that `legroom simulate --json` prints."""
        tally = self.tally
        counted = ("steps", "finished", "preemptions", "recomputed_tokens", "peak_blocks", "peak_running")
        document: dict[str, Any] = {
            **{name: getattr(tally, name) for name in counted},
            "rejected": len(self.rejections),
            "wasted_slot_ratio": round(self.wasted_slot_ratio, 6),
            **{name: _percentiles_json(self.wait_steps(name), "_steps") for name in WAITS},
            "requests": len(self.trace),
            "data_parallel_engines": self.trace.engines,
            "peak_waiting": tally.peak_waiting,
            "usable_blocks": self.settings.usable_blocks,
            "scheduled_tokens": tally.scheduled_tokens,
            "prefix_cache": {
                "hit_tokens": tally.cached_tokens,
                "prompt_tokens": tally.prompt_tokens,
                "hit_ratio": round(self.hit_ratio, 6),
            },
            "rejections": [rejection._asdict() for rejection in self.rejections[:100]],
            "interrupted": self.interrupted,
            "settings": {**asdict(self.settings), "groups": [asdict(group) for group in self.settings.groups]},
        }
        if self.clocks is not None:
            document["seconds"] = {
                "kind": "estimated",
                "makespan_s": round(self.makespan_s, 3),
                "output_tokens_per_s": round(self.output_tokens_per_s, 3),
                **{
                    name: {what: round(value, 4) for what, value in _percentiles_json(values).items()}
                    for name, values in self.seconds.items()
                },
            }
        return document


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted values; `share`: 0.99 for p99; 0 without values."""
    return values[min(len(values), int(max(1, -(-len(values) * share // 1)))) - 1] if values else 0


def _percentiles_json(values: Sequence[float], unit: str = "") -> dict[str, float]:
    """p50, p90, p99 and the maximum of sorted values; `unit` is appended to the names of the percentiles."""
    shares = {f"p{share}{unit}": percentile(values, share / 100) for share in (50, 90, 99)}
    return {**shares, "max": values[-1] if values else 0}


class Sampler:
    """Keeps the maxima of the pool's use over equal numbers of steps, which double when there are too many samples."""

    def __init__(self) -> None:
        self._width = 1
        self._points: dict[int, tuple[int, ...]] = {}

    def add(self, step: int, *figures: int) -> None:
        """Adds one step with its figures: blocks in use, running, waiting, and preemptions since the start."""
        self._merge(step // self._width, figures)
        while len(self._points) > MAX_SAMPLES:
            # Neighbouring samples become one with the larger values, which covers twice the steps.
            self._width *= 2
            narrower, self._points = self._points, {}
            for index, point in narrower.items():
                self._merge(index // 2, point)

    def _merge(self, index: int, point: tuple[int, ...]) -> None:
        """Raises each figure of sample number `index` to that of `point`, where it is smaller."""
        self._points[index] = tuple(map(max, point, self._points.get(index, point)))

    def samples(self) -> list[PoolSample]:
        """The samples so far in order of steps, each with the maxima over its steps."""
        return [PoolSample(index * self._width, *point) for index, point in sorted(self._points.items())]


def pool_curves_json(timeline: Timeline) -> dict[str, Any]:
    """The pool's samples as JSON columns of equal length; `time_s` is None where the trace counts steps."""
    samples = timeline.samples
    steps = [sample.step for sample in samples]
    times_s = _times_s(timeline, steps)
    return {
        "step": steps,
        "time_s": None if times_s is None else [round(time_s, 3) for time_s in times_s],
        "blocks_in_use": [sample.used_blocks for sample in samples],
        "running": [sample.running for sample in samples],
        "waiting": [sample.waiting for sample in samples],
        # Of each point, not since the start.
        "preemptions": [after - before for before, after in pairwise((0, *(each.preemptions for each in samples)))],
    }


def _times_s(timeline: Timeline, steps: list[int]) -> list[float] | None:
    """The seconds at which these steps began, interpolated between known ones; None where the trace counts steps."""
    clocks = timeline.clocks
    if clocks is None:
        return None
    known: dict[int, float] = {}
    for numbers, times in ((timeline.first_sched_steps, clocks.sched_s), (timeline.finish_steps, clocks.finish_s)):
        known |= {int(step): float(time_s) for step, time_s in zip(numbers, times, strict=True) if step >= 0}
    if not known:
        return [0.0] * len(steps)
    places = sorted(known)
    rising = list(zip(places, accumulate((known[step] for step in places), max), strict=True))
    return [_time_at_step(rising, bisect_left(places, step), step) for step in steps]


def _time_at_step(marks: list[tuple[int, float]], at: int, step: int) -> float:
    """Seconds at `step`, interpolated between the (step, seconds) of marks[at - 1] and marks[at]; clamped outside."""
    if at == 0:
        return marks[0][1]
    if at == len(marks):
        return marks[-1][1]
    (low, low_s), (high, high_s) = marks[at - 1], marks[at]
    return low_s + (high_s - low_s) * (step - low) / (high - low)
