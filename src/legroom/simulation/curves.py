"""A replay over time: what a picture of it draws, thinned out so that peaks stay."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any

from legroom.records import dataclass
from legroom.simulation.timeline import Timeline


@dataclass(frozen=True)
class PoolCurves:
    """Columns of equal length: a point for a stretch of steps, with the most of each in it."""

    steps: tuple[int, ...]
    times_s: tuple[float, ...] | None
    """None where the trace counts steps."""
    blocks_in_use: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    preemptions: tuple[int, ...]
    """In each stretch, not added up."""

    def as_json(self) -> dict[str, Any]:
        return {
            "step": list(self.steps),
            "time_s": None if self.times_s is None else [round(time_s, 3) for time_s in self.times_s],
            "blocks_in_use": list(self.blocks_in_use),
            "running": list(self.running),
            "waiting": list(self.waiting),
            "preemptions": list(self.preemptions),
        }


def pool_curves(timeline: Timeline) -> PoolCurves:
    samples = timeline.samples
    steps = tuple(sample.step for sample in samples)
    return PoolCurves(
        steps,
        _times_s(timeline, steps),
        tuple(sample.used_blocks for sample in samples),
        tuple(sample.running for sample in samples),
        tuple(sample.waiting for sample in samples),
        tuple(after - before for before, after in pairwise((0, *(sample.preemptions for sample in samples)))),
    )


def _times_s(timeline: Timeline, steps: tuple[int, ...]) -> tuple[float, ...] | None:
    """Seconds of steps, between those of the steps at which a request was scheduled or finished."""
    clocks = timeline.clocks
    if clocks is None:
        return None
    known: dict[int, float] = {}
    for numbers, times in ((timeline.first_sched_steps, clocks.sched_s), (timeline.finish_steps, clocks.finish_s)):
        known |= {int(step): float(time_s) for step, time_s in zip(numbers, times, strict=True) if step >= 0}
    if not known:
        return (0.0,) * len(steps)
    marks = sorted(known.items())
    highest = 0.0
    rising: list[tuple[int, float]] = []
    for step, time_s in marks:
        highest = max(highest, time_s)
        rising.append((step, highest))
    places = [step for step, _ in rising]
    return tuple(_between(rising, bisect_left(places, step), step) for step in steps)


def _between(marks: list[tuple[int, float]], at: int, step: int) -> float:
    if at == 0:
        return marks[0][1]
    if at == len(marks):
        return marks[-1][1]
    (low, low_s), (high, high_s) = marks[at - 1], marks[at]
    return low_s + (high_s - low_s) * (step - low) / (high - low)
