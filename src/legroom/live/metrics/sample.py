"""One scrape at a serving vLLM: gauges as they stand, counters as running totals, per engine and summed."""

from __future__ import annotations

import math
from typing import Literal

from legroom.records import dataclass

FailureKind = Literal[
    "refused",
    "timeout",
    "tls",
    "auth",
    "not_found",
    "http_error",
    "redirect",
    "cut_short",
    "not_metrics",
    "too_big",
    "dns",
    "unreachable",
]
"""Why a scrape failed."""

COUNTERS = (
    *("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "cached_tokens"),
    *("recomputed_tokens", "finished", "aborted", "errored"),
)
"""Counter fields of EngineSample."""
HISTOGRAMS = ("ttft", "inter_token", "e2e_latency", "queue_time", "request_prompt_tokens")


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Prometheus histogram with cumulative counts."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """The number of observations: the value of the last bucket."""
        return self.counts[-1]

    def since(self, older: Histogram | None) -> Histogram | None:
        """The observations made since the `older` histogram; None after a restart or where the bounds differ."""
        if older is None or older.bounds != self.bounds:
            return None
        # Whole numbers, because Python keeps the small ones once: a window holds thousands of them.
        grown = tuple(int(new - old) for new, old in zip(self.counts, older.counts, strict=True))
        return None if any(growth < 0 for growth in grown) else Histogram(self.bounds, grown, self.sum - older.sum)

    def plus(self, other: Histogram) -> Histogram:
        """The sum of both histograms; `self` where their bounds differ."""
        if other.bounds != self.bounds:
            return self
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def quantile(self, share: float) -> float | None:
        """The quantile at `share` (0 to 1), interpolated; in the last bucket its lower bound; None if empty."""
        if self.count <= 0 or len(self.bounds) < 2:
            return None
        wanted = share * self.count
        lower = below = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= wanted and count > below:
                return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
            lower, below = (bound if not math.isinf(bound) else lower), max(count, below)
        return lower


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine of a server: a data-parallel rank or one of several models. None: not reported."""

    model: str
    engine: str
    kv_use: float | None = None
    """Share of the pool's blocks in use, 0..1. V1 does not count unreferenced cached blocks."""
    running: float | None = None
    waiting: float | None = None
    waiting_for_capacity: float | None = None
    """Requests that wait for blocks or a place in the batch (0.20.0 on)."""
    swapped: float | None = None
    preemptions: float | None = None
    """vLLM counts a preemption when its victim runs again."""
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prefix_hit_rate: float | None = None
    """A gauge of the V0 engine (0.5.5 to 0.9.0), 0..1."""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cached_tokens: float | None = None
    recomputed_tokens: float | None = None
    finished: float | None = None
    aborted: float | None = None
    errored: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    size_tokens: int | None = None
    """Tokens that the pool holds, as vLLM reports (0.24.0 on), also for several KV cache groups."""
    max_concurrency: float | None = None
    """Full-length requests that the pool holds, as vLLM reports (0.24.0 on)."""
    prefix_caching: bool | None = None
    asleep: bool = False
    ttft: Histogram | None = None
    inter_token: Histogram | None = None
    e2e_latency: Histogram | None = None
    queue_time: Histogram | None = None
    request_prompt_tokens: Histogram | None = None

    @property
    def key(self) -> tuple[str, str]:
        """(model, engine number), which identifies an engine within its server."""
        return self.model, self.engine

    @property
    def pool_tokens(self) -> int | None:
        """KV pool tokens: as reported, else blocks times block size; None where unknown."""
        if self.size_tokens:
            return self.size_tokens
        return self.num_blocks * self.block_size if self.num_blocks and self.block_size else None


@dataclass(frozen=True, slots=True)
class GuardSample:
    """The guard in front of one API server: its queue, and totals of requests."""

    api_server: str = ""
    """The process id, where there are several API servers."""
    waiting: float = 0.0
    admitted: float = 0.0
    refused: float = 0.0
    """Turned away at once, because the queue was full."""
    timed_out: float = 0.0
    """Turned away after the longest wait that the policy allows."""


def sum_known(values: list[float | None]) -> float | None:
    """The sum of the values that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Sample:
    time_s: float
    server: str
    """Its address, without credentials."""
    engines: tuple[EngineSample, ...]
    rejections: float | None = None
    """Requests rejected by vLLM's queue limits (0.32.0 on)."""
    process_start_s: float | None = None
    memory_used_bytes: int | None = None
    """GPU memory of the server's processes, from NVML or the worker plugin."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    """PyTorch's allocator in the workers, from the worker plugin."""
    host_rss_bytes: int | None = None
    """Resident host memory of the workers."""
    others_bytes: int | None = None
    """GPU memory of other processes on the workers' GPUs, from the worker plugin."""
    alloc_retries: int | None = None
    """Allocator retries: PyTorch released its cache to serve an allocation."""
    api_server_rss_bytes: int | None = None
    """Resident host memory of the API server; not reported with several API servers."""
    stopped_engines: int | None = None
    """Processes stopped by SIGSTOP, seen on this machine or by the guard in vLLM."""
    start_requested: int | None = None
    """1 where a person or legroom asked for the last start, 0 where it followed a crash."""
    guards: tuple[GuardSample, ...] = ()
    notes: tuple[str, ...] = ()
    """Problems of the response that left it readable."""

    def total(self, field: str) -> float | None:
        """The sum of the EngineSample field named `field` over all engines; None where no engine reports it."""
        return sum_known([getattr(engine, field) for engine in self.engines])

    @property
    def running(self) -> float | None:
        """Running requests over all engines; None where no engine reports them."""
        return self.total("running")

    @property
    def waiting(self) -> float | None:
        """Requests waiting in the engines and in the guard before them; None where neither reports them."""
        return sum_known([self.total("waiting"), *(guard.waiting for guard in self.guards)])

    @property
    def num_blocks(self) -> int | None:
        """KV cache blocks over all engines; None where no engine reports them."""
        total = self.total("num_blocks")
        return None if total is None else int(total)

    @property
    def kv_use(self) -> float | None:
        """Mean KV cache use (0 to 1) of the engines, weighted by pool size; None where not reported."""
        known = [(e.kv_use, e.num_blocks or 0) for e in self.engines if e.kv_use is not None]
        if not known:
            return None
        blocks = sum(weight for _, weight in known)
        if not blocks or any(not weight for _, weight in known):
            return sum(use for use, _ in known) / len(known)
        return sum(use * weight for use, weight in known) / blocks

    @property
    def kv_use_max(self) -> float | None:
        """KV cache use (0 to 1) of the fullest engine; None where not reported."""
        return max((e.kv_use for e in self.engines if e.kv_use is not None), default=None)


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    time_s: float
    server: str
    kind: FailureKind
    message: str
    under_way: str = ""
    """What a `legroom run` behind the guard is doing to the server, in words; empty where it tells of none."""


ScrapeResult = Sample | ScrapeFailure
