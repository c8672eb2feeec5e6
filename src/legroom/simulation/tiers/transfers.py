"""Copies between the GPU and the host: their start, their duration, and those that a step waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from legroom.simulation.request import Request
from legroom.simulation.tiers.host_tier import ChunkKey, TierSettings


@dataclass(eq=False, slots=True)
class TransferJob:
    """Chunks of one request being copied."""

    request: Request
    keys: list[ChunkKey]
    is_store: bool
    num_blocks: int
    source_blocks: list[int] = field(default_factory=list)
    """GPU blocks that a store reads."""


@dataclass(slots=True)
class TransferPlan:
    """The copies that one step requests."""

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    flushes: dict[TransferJob, None] = field(default_factory=dict)
    """Stores that must be done before the step runs: their blocks are reused."""


Job = TypeVar("Job")


class Link(Generic[Job]):
    """One direction of copies: each starts when the one before it has ended."""

    def __init__(self, s_per_block: float) -> None:
        self.s_per_block = s_per_block
        self.busy_s = 0.0
        self._free_at_s = 0.0
        self._queue: deque[tuple[Job, float]] = deque()

    def submit(self, job: Job, num_blocks: int, now_s: float) -> float:
        """The time at which the copy will be done."""
        took = num_blocks * self.s_per_block
        self.busy_s += took
        self._free_at_s = max(self._free_at_s, now_s) + took
        self._queue.append((job, self._free_at_s))
        return self._free_at_s

    def end_of(self, jobs: Container[Job], now_s: float) -> float:
        """When the last of `jobs` is done."""
        return max((end for job, end in self._queue if job in jobs), default=now_s)

    @property
    def next_end_s(self) -> float | None:
        return self._queue[0][1] if self._queue else None

    def completed(self, now_s: float) -> list[Job]:
        done: list[Job] = []
        while self._queue and self._queue[0][1] <= now_s:
            done.append(self._queue.popleft()[0])
        return done


class TransferWorker:
    """The worker side of vLLM's offloading connector.

    A store is submitted with the next step, so that it does not delay the sampled tokens.
    """

    def __init__(self, settings: TierSettings) -> None:
        self.store_link = Link[TransferJob](settings.store_s_per_block)
        self.load_link = Link[TransferJob](settings.load_s_per_block)
        self._deferred: list[TransferJob] = []
        self.waited_s = 0.0
        """Time that steps waited for flushes."""

    def begin_step(self, plan: TransferPlan, now_s: float) -> float:
        """Submit the due copies and wait for those that the step depends on; the time at which the step can run."""
        self._deferred += [job for job in plan.stores if job in plan.flushes]
        for job in self._deferred:
            self.store_link.submit(job, job.num_blocks, now_s)
        self._deferred = []
        if plan.flushes:
            ready_s = max(now_s, self.store_link.end_of(plan.flushes, now_s))
            self.waited_s += ready_s - now_s
            now_s = ready_s
        for job in plan.loads:
            self.load_link.submit(job, job.num_blocks, now_s)
        return now_s

    def end_step(self, plan: TransferPlan, now_s: float) -> list[TransferJob]:
        """The copies that are done when the step has run."""
        self._deferred += [job for job in plan.stores if job not in plan.flushes]
        return self.store_link.completed(now_s) + self.load_link.completed(now_s)

    @property
    def next_event_s(self) -> float | None:
        """When the next copy ends; 0 where one waits to be submitted."""
        if self._deferred:
            return 0.0
        ends = [end for link in (self.store_link, self.load_link) if (end := link.next_end_s) is not None]
        return min(ends, default=None)
