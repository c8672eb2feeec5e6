"""The last minutes of one server as steps between samples, so that detectors compare rates and not totals. A step has
the increase of each counter and the gauges at its end. There is no step across a gap, a clock jump or before the second
sample. A counter that fell means a restart; its value is then the increase."""

import copy
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from legroom.live.metrics import sample as samples
from legroom.live.thresholds import LONGEST_INTERVAL_S
from legroom.records import dataclass

MAX_STEPS = 120
"""Ten minutes at 5 s: about 250 kB per server."""
WINDOW_S = 600.0
"""The longest window that a detector reads. A fleet's memory is mostly these steps."""
_MIN_STEPS = 16  # Kept at any interval: `forecast_least_steps` and a few.
SHORTEST_STEP_S = 1e-3
"""Closer samples are repeats of one sample, or a corrected clock."""
_GAP_S = 60.0
_FIRST_GAP_S = 1.1 * LONGEST_INTERVAL_S  # A Prometheus may scrape every few minutes.
_RESTART_COUNTERS = ("generation_tokens", "prompt_tokens", "preemptions", "prefix_queries")
"""Counters with a single series each: a fall means a restart."""


@dataclass(frozen=True, slots=True)
class EngineStep(samples.EngineSample):
    """One engine between two samples: gauges at the end, counters and histograms as increases. None: not reported."""

    seconds: float = 0.0
    kv_use_before: float | None = None
    running_before: float | None = None
    waiting_before: float | None = None
    waiting_for_capacity_before: float | None = None
    restarted: bool = False

    @property
    def queued(self) -> float:
        """Requests waiting at the end of the step for blocks or a place in the batch."""
        return self.waiting_for_capacity if self.waiting_for_capacity is not None else self.waiting or 0.0

    @property
    def queued_before(self) -> float:
        """Requests waiting at the start of the step for blocks or a place in the batch."""
        before = self.waiting_for_capacity_before
        return before if before is not None else self.waiting_before or 0.0

    @property
    def peak_kv_use(self) -> float:
        """The higher KV use (0 to 1) of the step's start and end, as use dips after a preemption."""
        return max(self.kv_use or 0.0, self.kv_use_before or 0.0)

    def has_no_room(self, full_ratio: float) -> bool:
        """Whether the KV pool is full, or requests wait while one more of the running ones' mean size does not fit."""
        use = self.peak_kv_use
        if use >= full_ratio:
            return True
        return bool(self.queued and self.running and use > 0.5 and use * (1 + 1 / self.running) > 1)

    @property
    def tokens_per_request(self) -> float | None:
        """Mean KV tokens of a running request; None where nothing runs or the pool is not reported."""
        if self.kv_use is None or self.pool_tokens is None or not self.running:
            return None
        return self.kv_use * self.pool_tokens / self.running

    @property
    def has_progress(self) -> bool:
        """Whether a counter, the KV use, the running or waiting requests changed in the step, or it restarted."""
        if any(getattr(self, counter) for counter in samples.COUNTERS):
            return True
        names = ("kv_use", "running", "waiting")
        return self.restarted or any(getattr(self, name) != getattr(self, f"{name}_before") for name in names)


@dataclass(frozen=True, slots=True)
class WindowStep:
    """All engines of a server between two samples."""

    time_s: float
    seconds: float
    engines: tuple[EngineStep, ...]
    restarted: bool = False
    guard: samples.GuardSample | None = None
    """All guards: waiting requests at the end, and the others as increases."""
    guard_waiting_before: float = 0.0
    rejections: float = 0.0
    """Requests that vLLM's own queue limits rejected."""

    def total(self, field: str) -> float | None:
        """The sum of the EngineStep field named `field` over the engines; None where none reports it."""
        if len(self.engines) == 1:  # nearly always, in hundreds of calls per scrape
            return getattr(self.engines[0], field)  # type: ignore[no-any-return]
        return samples.sum_known([getattr(engine, field) for engine in self.engines])


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    time_s: float
    memory_used_bytes: int | None = None
    reserved_bytes: int | None = None
    host_rss_bytes: int | None = None
    api_server_rss_bytes: int | None = None


def _increase(new: float | None, old: float | None, restarted: bool) -> float | None:
    """A counter's increase between two samples; `new` itself after a restart, None where not reported."""
    if new is None:
        return None
    if restarted:
        return new
    return max(new - old, 0.0) if old is not None else None


def _engine_step(new: samples.EngineSample, old: samples.EngineSample, seconds: float) -> EngineStep:
    """What changed between two samples of an engine: increases of counters and histograms, gauges old and new."""
    pairs = ((getattr(new, name), getattr(old, name)) for name in _RESTART_COUNTERS)
    restarted = any(now is not None and before is not None and now < before for now, before in pairs)
    values: dict[str, Any] = {name: getattr(new, name) for name in samples.EngineSample.__dataclass_fields__}
    # One object for equal names: a fleet's steps would hold as many copies.
    values |= {"model": sys.intern(new.model), "engine": sys.intern(new.engine)}
    values |= {name: _increase(values[name], getattr(old, name), restarted) for name in samples.COUNTERS}
    for name in samples.HISTOGRAMS:
        histogram: samples.Histogram | None = values[name]
        since = histogram if restarted or histogram is None else histogram.since(getattr(old, name))
        values[name] = since if since is not None and since.count > 0 else None
    gauges = ("kv_use", "running", "waiting", "waiting_for_capacity")
    before = {f"{name}_before": getattr(old, name) for name in gauges}
    return EngineStep(**values, **before, seconds=seconds, restarted=restarted)


def _guard_step(new: Iterable[samples.GuardSample], old: dict[str, samples.GuardSample]) -> samples.GuardSample | None:
    """All guards in one: what they counted since each one's last sample (`old`, by API server) and how many requests
    wait now; None without a guard."""
    pairs = [(guard, old.get(guard.api_server)) for guard in new]
    if not pairs:
        return None
    counts: dict[str, float] = {"waiting": sum(guard.waiting for guard, _ in pairs)}
    for name in ("admitted", "refused", "timed_out"):
        totals = ((getattr(guard, name), getattr(before, name)) for guard, before in pairs if before is not None)
        counts[name] = sum(now - before if now >= before else now for now, before in totals)
    return samples.GuardSample("", **counts)


class Window:
    """The recent scrapes of one server, added in order."""

    def __init__(self, server: str, window_s: float = WINDOW_S) -> None:
        self.server = server
        self._window_s = window_s
        self.latest: samples.Sample | None = None
        """The last sample, also while scrapes fail."""
        self.answered_earlier_s: float | None = None
        """When the server last answered an earlier process of legroom."""
        self.steps: deque[WindowStep] = deque(maxlen=MAX_STEPS)
        self.failures: deque[samples.ScrapeFailure] = deque(maxlen=64)
        """Failed scrapes since the last sample."""
        self.restarts: deque[float] = deque(maxlen=64)
        """Times of detected restarts."""
        self.crashes: deque[float] = deque(maxlen=64)
        """Times of restarts that nobody is known to have asked for."""
        self.switches: deque[float] = deque(maxlen=64)
        """Times at which another running server answered."""
        # A week of one point in five minutes.
        self.points: deque[MemoryPoint] = deque(maxlen=2048)
        self.last_scrape_s: float | None = None
        self._guards: dict[str, samples.GuardSample] = {}
        """The last sample of each guard: with several API servers a scrape shows one of them."""

    def snapshot(self) -> "Window":
        """A copy that another thread may read while this window goes on."""
        snapshot = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, deque):
                setattr(snapshot, name, value.copy())
        return snapshot

    def add(self, result: samples.ScrapeResult) -> None:
        """Adds a scrape; a sample ends a step. If the clock went back, all earlier steps are forgotten."""
        is_sample = isinstance(result, samples.Sample) and self.latest is not None
        if is_sample and self.latest and 0 <= result.time_s - self.latest.time_s < SHORTEST_STEP_S:  # a repeat
            self.last_scrape_s = result.time_s
            self.failures.clear()
            return
        if self.last_scrape_s is not None and result.time_s <= self.last_scrape_s:  # the clock jumped
            for kept in (self.steps, self.failures, self.restarts, self.crashes, self.switches, self.points):
                kept.clear()
            if self.latest is not None:
                self.latest = replace(self.latest, time_s=result.time_s)
        self.last_scrape_s = result.time_s
        if isinstance(result, samples.ScrapeFailure):
            self.failures.append(result)
            return
        step = self._step_to(result)
        if step is None:
            self.steps.clear()
        else:
            self.steps.append(step)
            while len(self.steps) > _MIN_STEPS and self.steps[0].time_s <= step.time_s - self._window_s:
                self.steps.popleft()
        if self._has_restarted(result, step):
            self.restarts.append(result.time_s)
            if not result.start_requested:
                self.crashes.append(result.time_s)
        if self._is_other_replica(result):
            self.switches.append(result.time_s)
        self.failures.clear()
        self.latest = result
        self._guards |= {guard.api_server: guard for guard in result.guards}
        point = MemoryPoint(**{name: getattr(result, name) for name in MemoryPoint.__dataclass_fields__})
        is_due = not self.points or result.time_s - self.points[-1].time_s >= 300.0
        if is_due and point != MemoryPoint(result.time_s):
            self.points.append(point)

    def _step_to(self, sample: samples.Sample) -> WindowStep | None:
        """The step from the last sample to this one; None after too long a gap, or where another replica answered."""
        before = self.latest
        if before is None or self._is_other_replica(sample):
            return None
        seconds, usual_s = sample.time_s - before.time_s, self.interval_s
        first_gap_s = _GAP_S if self.failures else _FIRST_GAP_S
        if not SHORTEST_STEP_S <= seconds <= (first_gap_s if usual_s is None else max(_GAP_S, 6.0 * usual_s)):
            return None
        old = {engine.key: engine for engine in before.engines}
        pairs = ((engine, old.get(engine.key)) for engine in sample.engines)
        engines = tuple(_engine_step(engine, before, seconds) for engine, before in pairs if before is not None)
        if not engines:
            return None
        restarted = any(engine.restarted for engine in engines)
        guards, waited = _guard_step(sample.guards, self._guards), sum(guard.waiting for guard in before.guards)
        refused = _increase(sample.rejections, before.rejections, restarted) or 0.0
        return WindowStep(sample.time_s, seconds, engines, restarted, guards, waited, refused)

    def _is_other_replica(self, sample: samples.Sample) -> bool:
        """Whether another process answered that started long ago, so that several servers share an address."""
        before = self.latest
        if before is None or not sample.process_start_s or not before.process_start_s:
            return False
        differs = abs(sample.process_start_s - before.process_start_s) > 1
        # Clocks may differ by a minute.
        return differs and sample.process_start_s < before.time_s - 60.0

    def _has_restarted(self, sample: samples.Sample, step: WindowStep | None) -> bool:
        """Whether the server started anew since the latest sample, by its start time, else by its counters."""
        before = self.latest
        if before is None or self._is_other_replica(sample):
            return False
        if sample.process_start_s and before.process_start_s:
            return sample.process_start_s > before.process_start_s + 1
        if step is not None:
            return step.restarted
        # Across a gap: a new engine's totals are usually below the old one's.
        old = {engine.key: engine for engine in before.engines}
        pairs = ((engine, old[engine.key]) for engine in sample.engines if engine.key in old)
        return any(_engine_step(engine, earlier, 1.0).restarted for engine, earlier in pairs)

    @property
    def interval_s(self) -> float | None:
        """The median seconds of the last 20 steps; None without a step."""
        recent = [step.seconds for step in list(self.steps)[-20:]]
        return statistics.median(recent) if recent else None

    @property
    def is_answering(self) -> bool:
        """Whether there is a sample and no scrape has failed since."""
        return self.latest is not None and not self.failures

    def recent(self, seconds: float) -> list[WindowStep]:
        """The steps of the last `seconds`, oldest first."""
        from_s = self.steps[-1].time_s - seconds if self.steps else 0.0
        return list(takewhile(lambda step: step.time_s > from_s, reversed(self.steps)))[::-1]

    def increase(self, field: str, seconds: float) -> float | None:
        """A counter's (`field` of EngineStep) increase over the last `seconds`; None where it is not reported."""
        return samples.sum_known([step.total(field) for step in self.recent(seconds)])

    def rate(self, field: str, seconds: float = 60.0) -> float | None:
        """A counter's (`field` of EngineStep) increase per second over the last `seconds`; None if not reported."""
        grown = [(value, step.seconds) for step in self.recent(seconds) if (value := step.total(field)) is not None]
        spent_s = sum(step_s for _, step_s in grown)
        return sum(growth for growth, _ in grown) / spent_s if spent_s > 0 else None

    def histogram(self, field: str, seconds: float = 60.0) -> samples.Histogram | None:
        """The histogram `field` of EngineStep over the last `seconds`, summed over engines; None where it is empty."""
        total: samples.Histogram | None = None
        for step in self.recent(seconds):
            for engine in step.engines:
                seen: samples.Histogram | None = getattr(engine, field)
                if seen is not None:
                    total = seen if total is None else total.plus(seen)
        return total

    def quantiles(self, field: str, shares: Sequence[float], seconds: float = 60.0) -> list[float | None]:
        """For each of `shares` (0.5: median) the quantile of the histogram `field` over `seconds`; None if empty."""
        seen = self.histogram(field, seconds)
        return [seen.quantile(share) if seen is not None else None for share in shares]

    def hit_rate(self, seconds: float = 300.0) -> float | None:
        """Prefix-cache hits per queried token (0 to 1), from counters or V0's gauge; None where unknown."""
        queried = self.increase("prefix_queries", seconds)
        if queried:
            return min((self.increase("prefix_hits", seconds) or 0.0) / queried, 1.0)
        gauges = [engine.prefix_hit_rate for engine in self.latest.engines] if self.latest else []
        known = [gauge for gauge in gauges if gauge is not None and gauge >= 0]
        return sum(known) / len(known) if known and queried is None else None
