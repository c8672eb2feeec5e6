"""Sends the load of a verification and samples the server's metrics and memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from legroom.live.gpu_memory import devices, server_processes, used_by
from legroom.live.metrics.endpoint import is_loopback, port_of
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape import ScrapeFailed, scrape
from legroom.records import dataclass
from legroom.verify.verification_checks import LoadRun

if TYPE_CHECKING:
    from legroom.verify.load import Load
    from legroom.verify.openai_client import RequestOutcome, ServerClient
    from legroom.verify.verification_run import VerificationRun

_MEMORY_INTERVAL_S = 0.5


@dataclass(frozen=True)
class LoadSample:
    """The server's metrics at one moment."""

    at_s: float
    """Seconds since the start of the load."""
    kv_use: float | None
    running: float
    waiting: float
    preemptions: float | None
    memory_bytes: int | None = None
    own_requests: int = 0
    """Open requests of this verification."""


@dataclass(frozen=True)
class MemoryReader:
    """Reads the memory of the server's processes."""

    source: str
    """What is read: GPU memory or resident memory."""
    read: Callable[[], int | None]
    total_bytes: int | None = None


class LoadMonitor:
    """Scrapes /metrics at an interval until cancelled."""

    def __init__(
        self, server: ServerClient, interval_s: float, memory: MemoryReader | None, open_requests: Callable[[], int]
    ) -> None:
        self.samples: list[LoadSample] = []
        self.last: Sample | None = None
        self.problem = ""
        self._server, self._interval_s, self._memory = server, interval_s, memory
        self._open_requests = open_requests
        self._started_s = time.monotonic()
        self._memory_at = -_MEMORY_INTERVAL_S

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self._interval_s)

    async def sample(self) -> Sample | None:
        """Scrape once; None where that fails."""
        try:
            sample = await scrape(self._server.session, self._server.metrics, 4.0)
        except ScrapeFailed as error:
            self.problem = error.message
            return None
        at = time.monotonic() - self._started_s
        memory = None
        if self._memory and at - self._memory_at >= _MEMORY_INTERVAL_S:
            self._memory_at, memory = at, self._memory.read()
        self.last = sample
        self.samples.append(
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

    async def drained(self, limit_s: float = 15.0) -> bool:
        """Wait until no request runs or waits; False where the time is up."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            sample = await self.sample()
            if sample is None:
                return False
            if not sample.running and not sample.waiting:
                await asyncio.sleep(0.2)
                await self.sample()
                return True
            await asyncio.sleep(0.2)
        return False


def memory_reader(url: str) -> MemoryReader | None:
    """GPU memory by NVML, else resident memory, of a server on this machine; None where its processes are hidden."""
    pids = server_processes(port_of(url))
    if not pids:
        return None
    server_pids = frozenset(pids)
    cards = [card for card in devices() if any(pid in server_pids for pid, _ in card.processes)]
    if cards:
        return MemoryReader("GPU memory (NVML)", lambda: used_by(server_pids), sum(card.total_bytes for card in cards))
    return MemoryReader("resident memory of its processes", lambda: _resident_bytes(pids))


def _resident_bytes(pids: tuple[int, ...]) -> int | None:
    import psutil

    try:
        return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)
    except psutil.Error:
        return None


async def run_load(run: VerificationRun, load: Load, concurrency: int) -> LoadRun:
    """Send the load until all requests are answered, the time is up or the user interrupts it."""
    return await _LoadSender(run, load, concurrency).run()


class _LoadSender:
    """Sends one request at a time at first, and `concurrency` after the first third."""

    def __init__(self, run: VerificationRun, load: Load, concurrency: int) -> None:
        self.verification, self.load, self.concurrency = run, load, concurrency
        self.outcomes: list[RequestOutcome] = []
        self.open: set[asyncio.Task[RequestOutcome]] = set()

    async def run(self) -> LoadRun:
        run = self.verification
        interval = 0.25 if is_loopback(run.request.url) else 1.0
        monitor = LoadMonitor(run.server, interval, run.memory, lambda: len(self.open))
        first = await monitor.sample()
        monitoring = asyncio.create_task(monitor.run())
        started_s, interrupted = time.monotonic(), ""
        try:
            async with asyncio.timeout(max(0.0, run.deadline_s - started_s)):
                await self._send_all()
        except TimeoutError:
            interrupted = f"the time was up (--timeout {run.request.timeout_s:g} s)"
        except asyncio.CancelledError:
            interrupted, run.interrupted = "interrupted", True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        seconds = time.monotonic() - started_s
        await self._cancel_open()
        monitoring.cancel()
        with suppress(asyncio.CancelledError):
            await monitoring
        # vLLM counts a preemption when its request runs again, so the last sample waits until nothing runs.
        if not await monitor.drained() and not monitor.problem:
            run.notes.append("the server had not finished when the last reading was taken")
        if monitor.problem and first is not None:  # otherwise it was reported at the start
            run.notes.append(f"a look at the metrics failed: {monitor.problem}")
        preemptions = _preemptions_between(first, monitor.last)
        return LoadRun(
            self.load.name,
            len(self.load.requests),
            self.concurrency,
            tuple(self.outcomes),
            tuple(monitor.samples),
            seconds,
            preemptions,
            interrupted,
        )

    async def _send_all(self) -> None:
        requests = self.load.requests
        ramp = max(1, len(requests) // 3)
        for number, request in enumerate(requests):
            allowed = min(self.concurrency, 1 + (self.concurrency - 1) * number // ramp)
            while len(self.open) >= allowed:
                await self._wait_for_one()
            self.open.add(
                asyncio.create_task(self.verification.send(request, 1000 + number + self.verification.request.seed))
            )
        while self.open:
            await self._wait_for_one()

    async def _wait_for_one(self) -> None:
        done, self.open = await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
        self.outcomes += (task.result() for task in done)
        self.verification.progress(len(self.outcomes) / len(self.load.requests))

    async def _cancel_open(self) -> None:
        """Close the connections; vLLM then aborts the requests and frees their blocks."""
        for task in self.open:
            task.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)
        self.open = set()


def _preemptions_between(first: Sample | None, last: Sample | None) -> int | None:
    if first is None or last is None or first.preemptions is None or last.preemptions is None:
        return None
    return round(last.preemptions - first.preemptions)
