"""What the GPUs of this machine show as used, and by whom, through NVML."""

from __future__ import annotations

from typing import Any

from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class GpuMemory:
    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes); bytes are 0 where the driver does not say, as inside a container."""


def devices() -> tuple[GpuMemory, ...]:
    """Every GPU of this machine; () without a driver."""
    try:
        import pynvml  # noqa: PLC0415 - loads the driver's library

        pynvml.nvmlInit()
    except Exception:
        return ()  # no package, or any of NVML's own errors: no driver, another version's, no permission
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = _device(pynvml, index)
            if gpu is not None:
                gpus.append(gpu)
        return tuple(gpus)
    except pynvml.NVMLError:
        return ()
    finally:
        _shut_down(pynvml)


def _shut_down(pynvml: Any) -> None:
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return


def _device(pynvml: Any, index: int) -> GpuMemory | None:
    """One GPU; None where it cannot be asked (fallen off the bus, a MIG parent without rights)."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return None
    return GpuMemory(index, name, uuid, int(memory.total), int(memory.used), _processes(pynvml, handle))


def _processes(pynvml: Any, handle: Any) -> tuple[tuple[int, int], ...]:
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return ()
    return tuple((int(process.pid), int(process.usedGpuMemory or 0)) for process in running)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def held_by(pids: frozenset[int], gpus: tuple[GpuMemory, ...]) -> int | None:
    """Bytes that these processes hold. Where the driver does not say, those of a GPU they have to themselves; None
    where neighbours are on it, because nobody can tell then whose memory grows."""
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


def used_by(pids: frozenset[int], gpus: tuple[GpuMemory, ...] | None = None) -> int | None:
    """Bytes used on the GPUs that any of these processes runs on; None where none does."""
    seen = devices() if gpus is None else gpus
    mine = [gpu.used_bytes for gpu in seen if any(pid in pids for pid, _ in gpu.processes)]
    return sum(mine) if mine else None
