"""The last minutes of one server: its scrapes turned into steps, so that detectors compare rates and never raw totals.

A step is what happened between two samples that follow each other: how much each counter grew, and where the gauges
stood at its end. There is no step across a gap, a clock that jumped or the first scrape; a counter that fell means the
engine started anew, and what it shows by then was all done since.
"""

from __future__ import annotations

import copy
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from legroom.live.metrics.sample import (
    COUNTERS,
    HISTOGRAMS,
    EngineSample,
    Histogram,
    Sample,
    ScrapeFailure,
    ScrapeResult,
)
from legroom.live.thresholds import LONGEST_INTERVAL_S
from legroom.records import dataclass

MAX_STEPS = 120
"""Ten minutes at five seconds, about a quarter of a megabyte. What needs days keeps a thinned line of its own."""
WINDOW_S = 600.0
"""The longest that anyone looks back: at a Prometheus' 15 s that is 40 steps. A fleet's memory is these steps."""
_MIN_STEPS = 16
"""However far apart: a trend and the time before it need that many (`forecast_least_steps`, and a few)."""
SHORTEST_STEP_S = 1e-3
"""Samples closer together than this are one: over next to no time any growth is an endless rate. Clocks that are put
right a little do that, and so does a source that tells the same sample twice; no watcher scrapes this often."""
_GAP_S = 60.0
_GAP_INTERVALS = 6.0
"""A pause this long is no interval: what happened in it is unknown, and its mean rate would hide that."""
_FIRST_GAP_S = 1.1 * LONGEST_INTERVAL_S
"""A Prometheus may scrape every few minutes, and a scrape may be late."""
_CLOCK_SKEW_S = 60.0
"""A server's clock and ours may differ by this much: a process that started later than that is a new one."""
_THIN_S = 300.0
_MAX_MEMORY_POINTS = 2048
"""One point in five minutes for a week."""
_RESTART_COUNTERS = ("generation_tokens", "prompt_tokens", "preemptions", "prefix_queries")
"""Counters of one series each: where one fell, the engine is a new one."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One engine between two samples. Counters are how much they grew; None: not shown."""

    key: tuple[str, str]
    seconds: float
    kv_use: float | None = None
    kv_use_before: float | None = None
    running: float | None = None
    running_before: float | None = None
    waiting: float | None = None
    waiting_before: float | None = None
    waiting_for_capacity: float | None = None
    waiting_for_capacity_before: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cached_tokens: float | None = None
    recomputed_tokens: float | None = None
    finished: float | None = None
    aborted: float | None = None
    errored: float | None = None
    num_blocks: int | None = None
    pool_tokens: int | None = None
    prefix_caching: bool | None = None
    asleep: bool = False
    restarted: bool = False
    ttft: Histogram | None = None
    inter_token: Histogram | None = None
    e2e_latency: Histogram | None = None
    queue_time: Histogram | None = None
    request_prompt_tokens: Histogram | None = None

    @property
    def queued(self) -> float:
        """Requests that wait for blocks or a place; those that wait for something else do not count."""
        return self.waiting_for_capacity if self.waiting_for_capacity is not None else self.waiting or 0.0

    @property
    def queued_before(self) -> float:
        """The same at the step's beginning."""
        before = self.waiting_for_capacity_before
        return before if before is not None else self.waiting_before or 0.0

    @property
    def peak_kv_use(self) -> float:
        """Of the pool, at the step's beginning or end: what a request or a victim of preemption held is free until the
        next one is computed, so the use may have just dipped."""
        return max(self.kv_use or 0.0, self.kv_use_before or 0.0)

    def has_no_room(self, full_ratio: float) -> bool:
        """Whether the pool is full, or requests wait and one more like those that run does not fit it.

        Where requests are large to the pool, it is as full as it gets well below 1.
        """
        use = self.peak_kv_use
        if use >= full_ratio:
            return True
        return bool(self.queued and self.running and use > 0.5 and use * (1 + 1 / self.running) > 1)

    @property
    def tokens_per_request(self) -> float | None:
        """What a running request holds of the pool, in tokens, on average."""
        if self.kv_use is None or self.pool_tokens is None or not self.running:
            return None
        return self.kv_use * self.pool_tokens / self.running

    @property
    def has_progress(self) -> bool:
        """Whether anything the engine reports moved. A stopped engine's figures stand still to the last digit."""
        if any(getattr(self, counter) for counter in COUNTERS):
            return True
        pairs = (
            (self.kv_use, self.kv_use_before),
            (self.running, self.running_before),
            (self.waiting, self.waiting_before),
        )
        return self.restarted or any(new != old for new, old in pairs)


@dataclass(frozen=True, slots=True)
class WindowStep:
    """A server between two samples."""

    time_s: float
    seconds: float
    engines: tuple[EngineStep, ...]
    restarted: bool = False

    def total(self, field: str) -> float | None:
        """The sum over the engines; None where none shows it."""
        if len(self.engines) == 1:  # nearly always, and asked hundreds of times a scrape
            return getattr(self.engines[0], field)  # type: ignore[no-any-return]
        known = [value for engine in self.engines if (value := getattr(engine, field)) is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A moment of the thinned line that is kept for days."""

    time_s: float
    memory_used_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    host_rss_bytes: int | None = None
    api_server_rss_bytes: int | None = None


def _grown(new: float | None, old: float | None, restarted: bool) -> float | None:
    if new is None:
        return None
    if restarted:
        return new
    return max(new - old, 0.0) if old is not None else None


def _engine_step(
    new: EngineSample, old: EngineSample, seconds: float, key: tuple[str, str] | None = None
) -> EngineStep:
    """`key` is the engine's from the step before, so that all steps share one."""
    pairs = ((getattr(new, name), getattr(old, name)) for name in _RESTART_COUNTERS)
    restarted = any(now is not None and before is not None and now < before for now, before in pairs)
    values: dict[str, Any] = {name: _grown(getattr(new, name), getattr(old, name), restarted) for name in COUNTERS}
    for name in HISTOGRAMS:
        histogram: Histogram | None = getattr(new, name)
        since = histogram if restarted or histogram is None else histogram.since(getattr(old, name))
        values[name] = since if since is not None and since.count > 0 else None
    return EngineStep(
        key=key or new.key,
        seconds=seconds,
        restarted=restarted,
        asleep=new.asleep,
        kv_use=new.kv_use,
        kv_use_before=old.kv_use,
        running=new.running,
        running_before=old.running,
        waiting=new.waiting,
        waiting_before=old.waiting,
        waiting_for_capacity=new.waiting_for_capacity,
        waiting_for_capacity_before=old.waiting_for_capacity,
        num_blocks=new.num_blocks,
        pool_tokens=new.pool_tokens,
        prefix_caching=new.prefix_caching,
        **values,
    )


class Window:
    """What is remembered of one server. Feed it scrapes in the order they were made."""

    def __init__(self, server: str, max_steps: int = MAX_STEPS, window_s: float = WINDOW_S) -> None:
        self.server = server
        self._window_s = window_s
        self.latest: Sample | None = None
        """The last sample; older than the last scrape where the server does not answer."""
        self.steps: deque[WindowStep] = deque(maxlen=max_steps)
        self.failures: deque[ScrapeFailure] = deque(maxlen=64)
        """Failed scrapes since the last sample."""
        self.restarts: deque[float] = deque(maxlen=64)
        """When the server was seen to have started anew."""
        self.switches: deque[float] = deque(maxlen=64)
        """When another server than the last time answered, one that had been there already."""
        self.points: deque[MemoryPoint] = deque(maxlen=_MAX_MEMORY_POINTS)
        self.last_scrape_s: float | None = None
        self.jumps = 0
        """How often the clock went backwards."""

    def snapshot(self) -> Window:
        """The window as it is now, for a thread to read while the next scrape comes in."""
        snapshot = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, deque):
                setattr(snapshot, name, value.copy())
        return snapshot

    def add(self, result: ScrapeResult) -> None:
        if self._is_repeated_sample(result):
            self.last_scrape_s = result.time_s
            self.failures.clear()
            return
        if self.last_scrape_s is not None and result.time_s <= self.last_scrape_s:
            self._reset_after_clock_jump(result)
        self.last_scrape_s = result.time_s
        if isinstance(result, ScrapeFailure):
            self.failures.append(result)
            return
        step = self._step(result)
        if step is None:
            self.steps.clear()  # what lies before a gap does not continue into what comes after
        else:
            self.steps.append(step)
            self._drop_old()
        if self._has_restarted(result, step):
            self.restarts.append(result.time_s)
        if self._is_other_replica(result):
            self.switches.append(result.time_s)
        self.failures.clear()
        self.latest = result
        self._thin(result)

    def _drop_old(self) -> None:
        steps, from_s = self.steps, self.steps[-1].time_s - self._window_s
        while len(steps) > _MIN_STEPS and steps[0].time_s <= from_s:
            steps.popleft()

    def _is_repeated_sample(self, result: ScrapeResult) -> bool:
        """What it grew by then counts for the step that ends with the next sample."""
        if self.latest is None or isinstance(result, ScrapeFailure):
            return False
        return 0 <= result.time_s - self.latest.time_s < SHORTEST_STEP_S

    def _reset_after_clock_jump(self, result: ScrapeResult) -> None:
        """Nothing seen before can be put in time with what comes now."""
        self.jumps += 1
        self.steps.clear()
        self.failures.clear()
        self.restarts.clear()
        self.switches.clear()
        self.points.clear()
        if self.latest is not None:
            self.latest = replace(self.latest, time_s=result.time_s)

    def _step(self, sample: Sample) -> WindowStep | None:
        before = self.latest
        if before is None or self._is_other_replica(sample):
            return None
        seconds = sample.time_s - before.time_s
        if not SHORTEST_STEP_S <= seconds <= self._longest_s:
            return None
        old = {engine.key: engine for engine in before.engines}
        keys = {engine.key: engine.key for engine in self.steps[-1].engines} if self.steps else {}
        engines = tuple(
            _engine_step(engine, old[key], seconds, keys.get(key))
            for engine in sample.engines
            if (key := engine.key) in old
        )
        return (
            WindowStep(sample.time_s, seconds, engines, any(engine.restarted for engine in engines))
            if engines
            else None
        )

    @property
    def _longest_s(self) -> float:
        """The longest gap between samples that still makes a step."""
        usual = self.interval_s
        if usual is None:
            return _GAP_S if self.failures else _FIRST_GAP_S
        return max(_GAP_S, _GAP_INTERVALS * usual)

    def _is_other_replica(self, sample: Sample) -> bool:
        """Whether this answer is of another process that ran all along: several servers behind one address."""
        before = self.latest
        if before is None or not sample.process_start_s or not before.process_start_s:
            return False
        differs = abs(sample.process_start_s - before.process_start_s) > 1
        return differs and sample.process_start_s < before.time_s - _CLOCK_SKEW_S

    def _has_restarted(self, sample: Sample, step: WindowStep | None) -> bool:
        before = self.latest
        if before is None or self._is_other_replica(sample):
            return False
        if sample.process_start_s and before.process_start_s:
            return sample.process_start_s > before.process_start_s + 1
        if step is not None:
            return step.restarted
        # Across a gap: a new engine's totals are below the old one's, unless it did more than that already.
        old = {engine.key: engine for engine in before.engines}
        return any(
            engine.key in old and _engine_step(engine, old[engine.key], 1.0).restarted for engine in sample.engines
        )

    def _thin(self, sample: Sample) -> None:
        sizes = (
            sample.memory_used_bytes,
            sample.allocated_bytes,
            sample.reserved_bytes,
            sample.host_rss_bytes,
            sample.api_server_rss_bytes,
        )
        if all(size is None for size in sizes):
            return
        if not self.points or sample.time_s - self.points[-1].time_s >= _THIN_S:
            self.points.append(MemoryPoint(sample.time_s, *sizes))

    @property
    def interval_s(self) -> float | None:
        """The usual time between scrapes; None before there were two."""
        recent = [step.seconds for step in list(self.steps)[-20:]]
        return statistics.median(recent) if recent else None

    @property
    def is_answering(self) -> bool:
        """Whether the last scrape brought a sample."""
        return self.latest is not None and not self.failures

    def recent(self, seconds: float) -> list[WindowStep]:
        """The steps that ended in the last `seconds` before the last scrape, the newest last."""
        if not self.steps:
            return []
        from_s = self.steps[-1].time_s - seconds
        kept = []
        for step in reversed(self.steps):
            if step.time_s <= from_s:
                break
            kept.append(step)
        return kept[::-1]

    def newest_first(self) -> Iterator[WindowStep]:
        """The steps, the newest first."""
        return reversed(self.steps)

    def increase(self, field: str, seconds: float) -> float | None:
        """How much a counter grew over the last `seconds`; None where it is not shown."""
        grown = [value for step in self.recent(seconds) if (value := step.total(field)) is not None]
        return sum(grown) if grown else None

    def rate(self, field: str, seconds: float = 60.0) -> float | None:
        """A counter's growth a second over the last `seconds`."""
        grown = spent_s = 0.0
        for step in self.recent(seconds):
            growth = step.total(field)
            if growth is not None:
                grown, spent_s = grown + growth, spent_s + step.seconds
        return grown / spent_s if spent_s > 0 else None

    def histogram(self, field: str, seconds: float = 60.0) -> Histogram | None:
        """What a histogram observed over the last `seconds`, all engines together."""
        total: Histogram | None = None
        for step in self.recent(seconds):
            for engine in step.engines:
                seen: Histogram | None = getattr(engine, field)
                if seen is not None:
                    total = seen if total is None else total.plus(seen)
        return total

    def quantile(self, field: str, share: float, seconds: float = 60.0) -> float | None:
        """A latency's quantile over the last `seconds`; None where nothing was observed."""
        return self.quantiles(field, (share,), seconds)[0]

    def quantiles(self, field: str, shares: Sequence[float], seconds: float = 60.0) -> list[float | None]:
        """Several of the same."""
        seen = self.histogram(field, seconds)
        return [seen.quantile(share) if seen is not None else None for share in shares]

    def hit_rate(self, seconds: float = 300.0) -> float | None:
        """Share of looked-up tokens found in the prefix cache; the V0 gauge where there are no counters."""
        asked = self.increase("prefix_queries", seconds)
        if asked:
            return min((self.increase("prefix_hits", seconds) or 0.0) / asked, 1.0)
        gauges = [engine.prefix_hit_rate for engine in self.latest.engines] if self.latest else []
        known = [gauge for gauge in gauges if gauge is not None and gauge >= 0]
        return sum(known) / len(known) if known and asked is None else None
