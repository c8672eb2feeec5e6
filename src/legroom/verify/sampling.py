"""Watching a server while it is loaded: its metrics, and its memory where that can be read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from legroom.live.gpu_memory import devices, server_processes, used_by
from legroom.live.metrics.endpoint import port_of
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape import ScrapeFailed, scrape
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.verify.server import ServerClient

_MEMORY_EVERY_S = 0.5
_DRAINED_S = 15.0


@dataclass(frozen=True)
class LoadSample:
    """The server at one moment of the run."""

    at_s: float
    """Since the run began."""
    kv_use: float | None
    running: float
    waiting: float
    preemptions: float | None
    memory_bytes: int | None = None
    ours: int = 0
    """Requests that this verification had open."""


@dataclass(frozen=True)
class MemoryReader:
    """A way to read the server's memory, and what it reads."""

    what: str
    read: Callable[[], int | None]
    total_bytes: int | None = None


class LoadMonitor:
    """Looks at /metrics again and again until told to stop."""

    def __init__(
        self, server: ServerClient, interval_s: float, memory: MemoryReader | None, open_requests: Callable[[], int]
    ) -> None:
        self.points: list[LoadSample] = []
        self.last: Sample | None = None
        self.problem = ""
        self._server, self._interval_s, self._memory = server, interval_s, memory
        self._open_requests = open_requests
        self._began = time.monotonic()
        self._memory_at = -_MEMORY_EVERY_S

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> Sample | None:
        """One look, kept as a point."""
        try:
            sample = await scrape(self._server.session, self._server.metrics, 4.0)
        except ScrapeFailed as error:
            self.problem = error.message
            return None
        at = time.monotonic() - self._began
        memory = None
        if self._memory and at - self._memory_at >= _MEMORY_EVERY_S:
            self._memory_at, memory = at, self._memory.read()
        self.last = sample
        self.points.append(
            LoadSample(
                at,
                sample.kv_use_max,
                sample.running or 0,
                sample.waiting or 0,
                sample.preemptions,
                memory,
                self._open_requests(),
            )
        )
        return sample

    async def drained(self, limit_s: float = _DRAINED_S) -> bool:
        """Wait until nothing runs or waits: only then are all preemptions counted."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            sample = await self.look()
            if sample is None:
                return False
            if not sample.running and not sample.waiting:
                await asyncio.sleep(0.2)
                await self.look()
                return True
            await asyncio.sleep(0.2)
        return False


def memory_of(url: str) -> MemoryReader | None:
    """GPU memory by NVML, else resident memory, of a server on this machine whose processes may be seen."""
    pids = server_processes(port_of(url))
    if not pids:
        return None
    wanted = frozenset(pids)
    mine = [card for card in devices() if any(pid in wanted for pid, _ in card.processes)]
    if mine:
        return MemoryReader("GPU memory (NVML)", lambda: used_by(wanted), sum(card.total_bytes for card in mine))
    return MemoryReader("resident memory of its processes", lambda: _resident(pids))


def _resident(pids: tuple[int, ...]) -> int | None:
    import psutil

    try:
        return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)
    except psutil.Error:
        return None
