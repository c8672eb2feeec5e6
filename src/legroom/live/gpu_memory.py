"""GPU memory of this machine by NVML, and the part that a server's processes hold."""

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from legroom.live.metrics.endpoint import is_loopback, port_of
from legroom.live.metrics.sample import Sample, ScrapeResult
from legroom.process_table import is_stopped, resident_bytes, shares_engines
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class GpuMemory:
    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes); 0 bytes where the driver does not report them, as in a container."""


def nvml_devices() -> tuple[GpuMemory, ...]:
    """All GPUs, a divided one as its MIG slices, read by NVML; () without a driver."""
    try:
        # vLLM's bundled copy, inside vLLM.
        pynvml: Any = sys.modules.get("vllm.third_party.pynvml") or importlib.import_module("pynvml")
        pynvml.nvmlInit()
    except Exception:
        return ()  # no package, no driver, another driver version, no permission
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            slices = _mig_slices(pynvml, index)
            gpu = None if slices else _read_device(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)
            gpus += slices or ([gpu] if gpu is not None else [])
        return tuple(gpus)
    except pynvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible(gpus: Sequence[GpuMemory], cuda_visible_devices: str | None) -> tuple[GpuMemory, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, up to its first invalid entry; all if the variable is None."""
    if cuda_visible_devices is None:
        return tuple(gpus)
    chosen = []
    for word in cuda_visible_devices.split(","):
        name = word.strip()
        is_uuid = name.startswith(("GPU-", "MIG-"))
        named = (gpu for gpu in gpus if (gpu.uuid.startswith(name) if is_uuid else name == str(gpu.index)))
        if (gpu := next(named, None)) is None:
            break
        chosen.append(gpu)
    return tuple(chosen)


def _mig_slices(pynvml: Any, index: int) -> list[GpuMemory]:
    """The MIG slices of a card; [] for a card without MIG."""
    try:
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        if pynvml.nvmlDeviceGetMigMode(card)[0] != 1:
            return []
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except (pynvml.NVMLError, AttributeError):
        return []  # no such card, no MIG support, old bindings
    slice_at = partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, card)
    made = (_read_device(pynvml, slice_at, at) for at in range(most))
    return [replace(gpu, index=index) for gpu in made if gpu is not None]


def _read_device(pynvml: Any, get_handle: Callable[[int], Any], index: int) -> GpuMemory | None:
    """The GPU or MIG slice with the NVML handle `get_handle(index)`; None where NVML fails (card off the bus)."""
    try:
        handle = get_handle(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        texts = (pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return None
    processes = []
    with contextlib.suppress(pynvml.NVMLError):
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    bytes_by_pid = tuple((int(process.pid), int(process.usedGpuMemory or 0)) for process in processes)
    name, uuid = (text.decode() if isinstance(text, bytes) else text for text in texts)
    return GpuMemory(index, name, uuid, int(memory.total), int(memory.used), bytes_by_pid)


def bytes_held_by(pids: frozenset[int], gpus: tuple[GpuMemory, ...]) -> int | None:
    """GPU memory that these processes hold together; None where they use no GPU, or the driver does not tell."""
    # Where the driver reports no bytes for them, the whole used memory of a GPU that nobody else uses is theirs.
    total_bytes = 0
    mine = [gpu for gpu in gpus if any(pid in pids for pid, _ in gpu.processes)]
    for gpu in mine:
        own = [size for pid, size in gpu.processes if pid in pids]
        if all(own):
            total_bytes += sum(own)
        elif len(own) == len(gpu.processes):
            total_bytes += gpu.used_bytes
        else:
            return None
    return total_bytes if mine else None


def bytes_on_gpus_of(pids: frozenset[int]) -> int | None:
    """Memory in use, by any process, on the GPUs that these processes run on; None where they run on none."""
    used = [gpu.used_bytes for gpu in nvml_devices() if any(pid in pids for pid, _ in gpu.processes)]
    return sum(used) if used else None


def server_processes(port: int) -> tuple[int, ...]:
    """The PIDs of the server that listens on a local port, its main process first; () where not visible."""
    try:
        import psutil  # slow to import
    except ImportError:
        return ()
    try:
        ends = psutil.net_connections("tcp")
        pid = next((end.pid for end in ends if end.status == "LISTEN" and end.laddr.port == port and end.pid), None)
        if pid is None:
            return ()
        top = psutil.Process(pid)
        # The parent of several API servers; an init process that adopted an orphan has another process group.
        parent = top.parent() if shares_engines(pid) else None
        if parent is not None and os.getpgid(parent.pid) == os.getpgid(pid):
            top = parent
        return (top.pid, *(child.pid for child in top.children(recursive=True)))
    except (psutil.Error, OSError):
        return ()


_PROCESSES_KEPT_S = 60.0  # Finding a server's processes reads all sockets of the machine.
_READ_EVERY_S = 2.0  # One NVML reading serves all servers of a scrape round.


class LocalServers:
    """Caches NVML readings and process lists between samples."""

    def __init__(self) -> None:
        self._cards: tuple[GpuMemory, ...] = ()
        self._read_s: float | None = None
        self._has_driver = True
        self._processes: dict[int, tuple[float, tuple[int, ...]]] = {}

    def with_process_figures(self, result: ScrapeResult) -> ScrapeResult:
        """The result with GPU memory, host memory and stopped processes if its server is local, else unchanged."""
        if not is_loopback(result.server):
            return result
        port, now_s = port_of(result.server), time.monotonic()
        if not isinstance(result, Sample):
            self._processes.pop(port, None)  # it may be restarting
            return result
        found_s, pids = self._processes.get(port, (-_PROCESSES_KEPT_S, ()))
        if now_s - found_s >= _PROCESSES_KEPT_S:
            _, pids = self._processes[port] = now_s, server_processes(port)
        if not pids:
            return result
        if self._has_driver and (self._read_s is None or now_s - self._read_s >= _READ_EVERY_S):
            self._cards, is_first = nvml_devices(), self._read_s is None
            self._read_s = now_s
            self._has_driver = bool(self._cards) or not is_first  # not read again where the first read found none
        used_bytes = bytes_held_by(frozenset(pids), self._cards)
        host_rss_bytes, stopped = result.host_rss_bytes, sum(map(is_stopped, pids)) or result.stopped_engines
        if host_rss_bytes is None and pids[1:]:
            host_rss_bytes = resident_bytes(pids[1:])  # the API server, the first, reports its own memory
        used_bytes = result.memory_used_bytes if used_bytes is None else used_bytes
        return replace(result, memory_used_bytes=used_bytes, host_rss_bytes=host_rss_bytes, stopped_engines=stopped)
