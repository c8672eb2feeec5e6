"""Adds GPU memory, host memory and stopped processes to samples of servers on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from legroom.live.gpu_memory import GpuMemory, devices, held_by, server_processes
from legroom.live.metrics.endpoint import is_loopback, port_of
from legroom.live.metrics.sample import Sample, ScrapeResult
from legroom.process_table import is_stopped, resident_bytes

_PROCESSES_KEPT_S = 60.0
"""Finding a server's processes reads all sockets of the machine."""
_READ_EVERY_S = 2.0
"""One NVML reading serves all servers of a scrape round."""


class LocalServers:
    """Caches NVML readings and process lists between samples."""

    def __init__(
        self,
        read: Callable[[], tuple[GpuMemory, ...]] = devices,
        find: Callable[[int], tuple[int, ...]] = server_processes,
        clock: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[int], bool] = is_stopped,
        resident: Callable[[tuple[int, ...]], int | None] = resident_bytes,
    ) -> None:
        self._read, self._find, self._clock = read, find, clock
        self._is_stopped, self._resident = is_stopped, resident
        self._cards: tuple[GpuMemory, ...] = ()
        self._read_s: float | None = None
        self._has_driver = True
        self._processes: dict[int, tuple[float, tuple[int, ...]]] = {}

    def with_process_figures(self, result: ScrapeResult) -> ScrapeResult:
        """The result with GPU memory, host memory and stopped processes, for a local server with visible processes."""
        if not is_loopback(result.server):
            return result
        port, now_s = port_of(result.server), self._clock()
        if not isinstance(result, Sample):
            self._processes.pop(port, None)  # it may be restarting
            return result
        pids = self._of(port, now_s)
        if not pids:
            return result
        used_bytes = held_by(frozenset(pids), self._cards_now(now_s))
        return replace(
            result,
            memory_used_bytes=result.memory_used_bytes if used_bytes is None else used_bytes,
            host_rss_bytes=self._below_the_api_server(pids) if result.host_rss_bytes is None else result.host_rss_bytes,
            stopped_engines=sum(map(self._is_stopped, pids)) or result.stopped_engines,
        )

    def _below_the_api_server(self, pids: tuple[int, ...]) -> int | None:
        """Resident memory of all processes but the API server, which reports its own."""
        return self._resident(pids[1:]) if pids[1:] else None

    def _cards_now(self, now_s: float) -> tuple[GpuMemory, ...]:
        if self._has_driver and (self._read_s is None or now_s - self._read_s >= _READ_EVERY_S):
            self._cards, is_first = self._read(), self._read_s is None
            self._read_s = now_s
            self._has_driver = bool(self._cards) or not is_first
        return self._cards

    def _of(self, port: int, now_s: float) -> tuple[int, ...]:
        found_s, pids = self._processes.get(port, (-_PROCESSES_KEPT_S, ()))
        if now_s - found_s >= _PROCESSES_KEPT_S:
            found_s, pids = self._processes[port] = now_s, self._find(port)
        return pids
