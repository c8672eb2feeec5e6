"""The memory of the worker that this process is.

Only what the process already knows is read: PyTorch's own books, NVML and /proc, never a call into CUDA. One from
another thread would break a graph capture that is under way.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import psutil

from legroom.black_box import WorkerHostMemory
from legroom.records import dataclass
from legroom.worker.allocator import allocator_state

PROFILING = frozenset({"determine_available_memory", "determine_num_available_blocks"})
"""Functions of vLLM's that read PyTorch's peak to size the KV cache; while one runs the peak is not ours to reset."""


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
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    largest_free_bytes: int | None = None
    graph_pool_bytes: int | None = None
    non_torch_bytes: int | None = None
    """Held by this process beside what PyTorch reserves: the CUDA context, NCCL, libraries."""
    others_bytes: int | None = None
    """Held by other processes on the card."""
    peak_allocated_bytes: int | None = None
    """The most that was handed out at once since the look before this one."""
    alloc_retries: int | None = None
    host_rss_bytes: int | None = None
    """What the process holds of the host's memory; with the first of its devices alone."""
    host_pinned_bytes: int | None = None
    """Of that, what PyTorch pinned for copies to and from the card."""


def read() -> tuple[WorkerMemory, ...]:
    """Nothing in a process that is no worker, or not yet: its place among the others is not settled."""
    rank = worker_rank()
    if rank is None:
        return ()
    cuda = initialized_cuda()
    host = read_host(cuda)
    if cuda is None:
        rss = host.rss_bytes
        return (WorkerMemory(rank, "cpu", used_bytes=rss, host_rss_bytes=rss, host_pinned_bytes=host.pinned_bytes),)
    memory: list[WorkerMemory] = []
    for device in range(cuda.device_count()):
        taken = _device(cuda, device, rank, WorkerHostMemory() if memory else host)
        memory += [taken] if taken else []
    return tuple(memory)


def worker_rank() -> int | None:
    groups = sys.modules.get("vllm.distributed.parallel_state")
    world = getattr(groups, "_WORLD", None)
    return None if world is None else int(world.rank)


def initialized_cuda() -> Any | None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def read_host(cuda: Any | None) -> WorkerHostMemory:
    rss = psutil.Process(os.getpid()).memory_info().rss
    stats = getattr(cuda, "host_memory_stats", None)  # PyTorch 2.7 on
    pinned = stats().get("allocated_bytes.current") if stats is not None else None
    return WorkerHostMemory(int(rss), None if pinned is None else int(pinned))


def _device(cuda: Any, device: int, rank: int, host: WorkerHostMemory) -> WorkerMemory | None:
    """None where the worker holds nothing: it sees the other workers' GPUs too."""
    if not cuda.memory_stats(device).get("reserved_bytes.all.current", 0):
        return None
    torch = allocator_state(cuda, device, with_blocks=False)
    _reset_peak(cuda, device)
    card = card_use(cuda, device)
    return WorkerMemory(
        rank,
        card.gpu,
        card.used_bytes,
        torch.reserved_bytes,
        torch.allocated_bytes,
        torch.active_bytes,
        torch.inactive_split_bytes,
        torch.largest_free_bytes,
        torch.graph_pool_bytes,
        None if card.own_bytes is None else max(card.own_bytes - torch.reserved_bytes, 0),
        card.others_bytes,
        torch.peak_allocated_bytes,
        torch.alloc_retries,
        host.rss_bytes,
        host.pinned_bytes,
    )


def _reset_peak(cuda: Any, device: int) -> None:
    """So that the next look sees the peak since this one. vLLM sizes its KV cache by the same figure, so not then."""
    reset = getattr(cuda, "reset_peak_memory_stats", None)
    if reset is not None and not is_profiling():
        reset(device)


def is_profiling() -> bool:
    """Whether any thread of this process is inside vLLM's measurement of its own peak."""
    own = threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame: Any = top if thread != own else None
        while frame is not None:
            if frame.f_code.co_name in PROFILING:
                return True
            frame = frame.f_back
    return False


@dataclass(frozen=True)
class CardUse:
    """A card as NVML shows it, from where this process stands."""

    gpu: str
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None


def card_use(cuda: Any, device: int) -> CardUse:
    """PyTorch writes a UUID without NVML's prefix."""
    from legroom.live.gpu_memory import devices

    uuid = str(cuda.get_device_properties(device).uuid)
    card = next((gpu for gpu in devices() if gpu.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-")), None)
    if card is None:
        return CardUse(str(device))
    own = _own_bytes(card.processes, card.used_bytes)
    # Not what is used less what is ours: the driver keeps a part of the card for itself, 0.6 GiB of an H200.
    rest = [size for pid, size in card.processes if pid != os.getpid()]
    alone = len(card.processes) == 1
    others = 0 if alone else sum(rest) if own is not None and all(rest) else None
    return CardUse(str(card.index), card.name, card.total_bytes, card.used_bytes, own, others)


def _own_bytes(processes: tuple[tuple[int, int], ...], used_bytes: int) -> int | None:
    """What is this process's. A container shows other numbers for processes than the driver does: one that is listed
    alone is this one."""
    own = [size for pid, size in processes if pid == os.getpid()]
    if own:
        return own[0] or (used_bytes if len(processes) == 1 else None)
    return used_bytes if len(processes) == 1 else None
