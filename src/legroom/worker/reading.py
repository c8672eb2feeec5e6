"""The memory of the worker that this process is.

Only what the process already knows is read: PyTorch's own counts and NVML, never a call into CUDA. One from another
thread would break a graph capture that is under way.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from legroom.records import dataclass


@dataclass(frozen=True)
class WorkerMemory:
    """One device of one worker."""

    rank: int
    """Among the workers of its engine, or of all engines where they compute together."""
    gpu: str
    """NVML's index; `cpu` for a worker without a GPU."""
    used_bytes: int | None = None
    """On the whole card, whoever holds it; without a GPU what the process holds of the host's memory."""
    reserved_bytes: int | None = None
    """Taken from the card by PyTorch's allocator."""
    allocated_bytes: int | None = None
    """Of those, handed out."""


def read() -> tuple[WorkerMemory, ...]:
    """Nothing in a process that is no worker, or not yet: its place among the others is not settled."""
    rank = _rank()
    if rank is None:
        return ()
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return (_host(rank),)
    return tuple(memory for device in range(cuda.device_count()) if (memory := _device(cuda, device, rank)))


def _rank() -> int | None:
    groups = sys.modules.get("vllm.distributed.parallel_state")
    world = getattr(groups, "_WORLD", None)
    return None if world is None else int(world.rank)


def _host(rank: int) -> WorkerMemory:
    import psutil  # noqa: PLC0415

    return WorkerMemory(rank, "cpu", used_bytes=psutil.Process(os.getpid()).memory_info().rss)


def _device(cuda: Any, device: int, rank: int) -> WorkerMemory | None:
    """None where the worker holds nothing: it sees the other workers' GPUs too."""
    counts = cuda.memory_stats(device)
    reserved = counts.get("reserved_bytes.all.current", 0)
    if not reserved:
        return None
    index, used = _card(str(cuda.get_device_properties(device).uuid))
    gpu = str(device) if index is None else str(index)
    return WorkerMemory(rank, gpu, used, int(reserved), int(counts.get("allocated_bytes.all.current", 0)))


def _card(uuid: str) -> tuple[int | None, int | None]:
    """(NVML's index, bytes in use); PyTorch writes a UUID without NVML's prefix."""
    from legroom.live import nvml  # noqa: PLC0415

    for gpu in nvml.devices():
        if gpu.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            return gpu.index, gpu.used_bytes
    return None, None
