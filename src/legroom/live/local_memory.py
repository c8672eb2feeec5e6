"""GPU memory of the servers on this machine: which processes they are, and what NVML says of the GPUs they use."""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from legroom.live.metrics.sample import Look, Sample
from legroom.live.nvml import GpuMemory, devices, held_by

if TYPE_CHECKING:
    import psutil

_ONE_OF_SEVERAL = re.compile(r"::APIServer_\d+\s*$")
"""How vLLM titles API servers where there are more than one."""
_PROCESSES_KEPT_S = 60.0
"""A server's processes change when it restarts, and finding them reads the whole table of sockets."""
_READ_EVERY_S = 2.0
"""One reading serves all servers of a round."""


def is_loopback(address: str) -> bool:
    """Whether an address stays on this machine."""
    host = urlsplit(address if "://" in address else f"http://{address}").hostname or ""
    try:
        ip = ipaddress.ip_address(host)
        return ip.is_loopback or ip.is_unspecified  # 0.0.0.0 is what a server is told to listen on
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def port_of(address: str) -> int:
    """The port that an address means."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    return parts.port or (443 if parts.scheme == "https" else 80)


def server_processes(port: int) -> tuple[int, ...]:
    """Who listens on a port of this machine, and everything below it; () where that cannot be seen."""
    import psutil  # noqa: PLC0415 - only where memory is asked for

    try:
        ends = psutil.net_connections("tcp")
        pid = next((end.pid for end in ends if end.status == "LISTEN" and end.laddr.port == port and end.pid), None)
        if pid is None:
            return ()
        top = _top(psutil.Process(pid))
        return (top.pid, *(child.pid for child in top.children(recursive=True)))
    except (psutil.Error, OSError):
        return ()


def _top(listener: psutil.Process) -> psutil.Process:
    """The process that made the server. One of several API servers is a sibling of the engines."""
    parent = listener.parent() if _ONE_OF_SEVERAL.search(" ".join(listener.cmdline())) else None
    # Who adopts one whose parent has died is no part of it: another group.
    return parent if parent is not None and os.getpgid(parent.pid) == os.getpgid(listener.pid) else listener


class LocalMemory:
    """Adds the GPU memory to looks at servers of this machine; elsewhere, and without a driver, it adds nothing."""

    def __init__(
        self,
        read: Callable[[], tuple[GpuMemory, ...]] = devices,
        find: Callable[[int], tuple[int, ...]] = server_processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._find, self._clock = read, find, clock
        self._cards: tuple[GpuMemory, ...] = ()
        self._read_s: float | None = None
        self._has_driver = True
        self._processes: dict[int, tuple[float, tuple[int, ...]]] = {}

    def added(self, look: Look) -> Look:
        """The look with `memory_used_bytes`, where that can be said."""
        if not self._has_driver or not isinstance(look, Sample) or not is_loopback(look.server):
            return look
        now_s = self._clock()
        if self._read_s is None or now_s - self._read_s >= _READ_EVERY_S:
            self._cards, first = self._read(), self._read_s is None
            self._read_s = now_s
            self._has_driver = bool(self._cards) or not first
        if not self._cards:
            return look
        used = held_by(frozenset(self._of(port_of(look.server), now_s)), self._cards)
        return look if used is None else replace(look, memory_used_bytes=used)

    def _of(self, port: int, now_s: float) -> tuple[int, ...]:
        found_s, pids = self._processes.get(port, (0.0, ()))
        if not pids or now_s - found_s >= _PROCESSES_KEPT_S:
            found_s, pids = self._processes[port] = now_s, self._find(port)
        return pids
