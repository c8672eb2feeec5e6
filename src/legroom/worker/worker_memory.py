"""Reads the memory of this worker process. It uses PyTorch's own counters, NVML and /proc, and never calls CUDA: a call
from another thread would break a graph capture in progress."""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import psutil

from legroom.black_box import AllocatorSegment, AllocatorState, BlockState, SegmentBlock, WorkerHostMemory
from legroom.records import dataclass, field

READ_INTERVAL_S = 5.0
CONF_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COMMON_POOL = (0, 0)
_PACE = 2000.0  # Pause between two listings of the segments, as a multiple of the time one takes: 3 ms give 6 s.
_STATES: dict[str, BlockState] = {"active_allocated": "allocated", "inactive": "free"}
"""PyTorch's names; a block that waits for a stream has one of several other names."""


def _segment_sums(segments: tuple[AllocatorSegment, ...]) -> dict[str, Any]:
    """The fields of `AllocatorState` that are sums over segments; empty where this PyTorch lists no segments."""
    if not segments:
        return {}
    private = [segment for segment in segments if segment.pool]
    return {
        "largest_free_bytes": max((each.largest_free_bytes for each in segments if not each.pool), default=None),
        "graph_pool_bytes": sum(segment.size_bytes for segment in private if segment.pool == "graph"),
        "private_pool_bytes": sum(segment.size_bytes for segment in private),
        "private_free_bytes": sum(segment.size_bytes - segment.allocated_bytes for segment in private),
        "has_expandable_segments": any(segment.is_expandable for segment in segments),
    }


class PacedSums:
    """The sums over a device's segments, listed so rarely that it takes a two-thousandth of the time. Listing hundreds
    of blocks holds Python's lock for milliseconds, and the model's thread waits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept: dict[int, tuple[float, dict[str, Any]]] = {}

    def read(self, cuda: Any, device: int) -> dict[str, Any]:
        """The segments' sums for a device; kept for 2,000 times as long as listing the segments took."""
        began_s = self._clock()
        due_s, sums = self._kept.get(device, (began_s, {}))
        if began_s < due_s:
            return sums
        sums = _segment_sums(_allocator_segments(cuda, device, with_blocks=False))
        ended_s = self._clock()
        self._kept[device] = ended_s + _PACE * (ended_s - began_s), sums
        return sums


_PACED = PacedSums()


def allocator_state(cuda: Any, device: int, *, with_blocks: bool) -> AllocatorState:
    """The allocator's state on a device, with its segments and blocks if `with_blocks`, else with sums only."""
    counts = cuda.memory_stats(device)
    segments = _allocator_segments(cuda, device, with_blocks=True) if with_blocks else ()
    sums = _segment_sums(segments) if with_blocks else _PACED.read(cuda, device)
    return AllocatorState(
        allocated_bytes=int(counts.get("allocated_bytes.all.current", 0)),
        reserved_bytes=int(counts.get("reserved_bytes.all.current", 0)),
        active_bytes=_int_or_none(counts, "active_bytes.all.current"),
        inactive_split_bytes=_int_or_none(counts, "inactive_split_bytes.all.current"),
        peak_allocated_bytes=_int_or_none(counts, "allocated_bytes.all.peak"),
        alloc_retries=_int_or_none(counts, "num_alloc_retries"),
        ooms=_int_or_none(counts, "num_ooms"),
        settings=next((value for name in CONF_NAMES if (value := os.environ.get(name))), None),
        segments=segments,
        **sums,
    )


def _int_or_none(counts: dict[str, Any], name: str) -> int | None:
    """PyTorch's counter of this name as an int; None where its release has none."""
    value = counts.get(name)
    return None if value is None else int(value)


def _allocator_segments(cuda: Any, device: int, *, with_blocks: bool) -> tuple[AllocatorSegment, ...]:
    """The segments of PyTorch's allocator on the device; empty where it has no snapshot."""
    snapshot = getattr(cuda, "memory_snapshot", None)
    if snapshot is None:
        return ()
    # The id of vLLM's CUDA graph memory pool; None where there is none yet.
    platform = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    handle = getattr(platform, "_global_graph_pool", None)
    graph_pool = tuple(handle) if handle is not None else None
    own = [segment for segment in snapshot() if segment.get("device", device) == device]
    return tuple(_allocator_segment(segment, graph_pool, with_blocks=with_blocks) for segment in own)


def _allocator_segment(
    segment: dict[str, Any], graph_pool: tuple[int, ...] | None, *, with_blocks: bool
) -> AllocatorSegment:
    """A segment of a PyTorch memory snapshot; `graph_pool`: the id of vLLM's CUDA graph pool, if known."""
    blocks = segment.get("blocks", ())
    largest = max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
    listed = (SegmentBlock(int(block["size"]), _STATES.get(block["state"], "pending")) for block in blocks)
    pool = tuple(segment.get("segment_pool_id", _COMMON_POOL))
    return AllocatorSegment(
        size_bytes=int(segment["total_size"]),
        allocated_bytes=int(segment.get("allocated_size", 0)),
        largest_free_bytes=int(largest),
        pool=_pool_name(pool, graph_pool),
        is_small=segment.get("segment_type") == "small",
        is_expandable=bool(segment.get("is_expandable", False)),
        blocks=tuple(listed) if with_blocks else (),
    )


def _pool_name(pool: tuple[int, ...], graph_pool: tuple[int, ...] | None) -> str:
    """ "" for the common pool, `graph` for vLLM's CUDA graph pool (if unknown, any private one), else the pool's id."""
    if pool == _COMMON_POOL:
        return ""
    return "graph" if graph_pool is None or pool == graph_pool else ":".join(map(str, pool))


PROFILING = frozenset({"determine_available_memory", "determine_num_available_blocks"})
"""vLLM's functions that read PyTorch's peak to size the KV cache; the peak is not reset while one runs."""


def _measure(gauge_help: str) -> Any:
    """A dataclass field that is None where it was not read; `gauge_help`: the help text of its gauge."""
    return field(default=None, metadata={"about": gauge_help})


@dataclass(frozen=True)
class WorkerMemory:
    """One device of one worker."""

    rank: int
    """Among the workers of its engine, or of all engines where they compute together."""
    gpu: str
    """NVML's index; `cpu` for a worker without a GPU."""
    used_bytes: int | None = _measure(
        "Memory in use on the worker's GPU, whoever holds it; of the process where it has no GPU."
    )
    reserved_bytes: int | None = _measure("Memory that PyTorch's allocator took from the GPU.")
    allocated_bytes: int | None = _measure("Of what the allocator reserves, what it handed out.")
    active_bytes: int | None = _measure("Handed out, or given back and still used by a stream.")
    inactive_split_bytes: int | None = _measure(
        "Free, in segments that are partly in use: it cannot be returned to the GPU."
    )
    largest_free_bytes: int | None = _measure("The largest free piece of the allocator's common pool.")
    graph_pool_bytes: int | None = _measure("Reserved by the private pools of CUDA graphs.")
    non_torch_bytes: int | None = _measure("Held by the worker on the GPU beside what the allocator reserves.")
    others_bytes: int | None = _measure("Held by other processes on the worker's GPU.")
    peak_allocated_bytes: int | None = _measure(
        "The most that was handed out at once since the previous reading, five seconds earlier."
    )
    alloc_retries: int | None = _measure(
        "How often the allocator had to return its cache to the GPU to serve a request."
    )
    host_rss_bytes: int | None = _measure("What the worker's process holds of the host's memory.")
    """Only with the first of its devices."""
    host_pinned_bytes: int | None = _measure("Of that, what PyTorch pinned for copies to and from the GPU.")


MEASURES: dict[str, str] = {
    each.name: each.metadata["about"] for each in fields(WorkerMemory) if "about" in each.metadata
}
"""Each measure with the help text of its gauge."""


def read_worker_memory() -> tuple[WorkerMemory, ...]:
    """The memory per device on which PyTorch holds some, or of the CPU; empty in a process without a rank yet."""
    rank = worker_rank()
    if rank is None:
        return ()
    cuda = initialized_cuda()
    host = read_host_memory(cuda)
    if cuda is None:
        rss = host.rss_bytes
        return (WorkerMemory(rank, "cpu", used_bytes=rss, host_rss_bytes=rss, host_pinned_bytes=host.pinned_bytes),)
    memory: list[WorkerMemory] = []
    for device in range(cuda.device_count()):
        taken = _device_memory(cuda, device, rank, WorkerHostMemory() if memory else host)
        memory += [taken] if taken else []
    return tuple(memory)


def worker_rank() -> int | None:
    """The rank of this process; None where vLLM has not set one."""
    world = getattr(sys.modules.get("vllm.distributed.parallel_state"), "_WORLD", None)
    return None if world is None else int(world.rank)


def initialized_cuda() -> Any | None:
    """`torch.cuda`; None where CUDA is not initialized."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def read_host_memory(cuda: Any | None) -> WorkerHostMemory:
    """The process's resident bytes, and pinned bytes where PyTorch (2.7 on) counts them."""
    rss = psutil.Process(os.getpid()).memory_info().rss
    stats = getattr(cuda, "host_memory_stats", None)  # PyTorch 2.7 on
    pinned = stats().get("allocated_bytes.current") if stats is not None else None
    return WorkerHostMemory(int(rss), None if pinned is None else int(pinned))


def _device_memory(cuda: Any, device: int, rank: int, host: WorkerHostMemory) -> WorkerMemory | None:
    """This worker's memory on a device, or None where it holds nothing there, as it sees other workers' GPUs too.
    Resets PyTorch's peak unless vLLM profiles."""
    if not cuda.memory_stats(device).get("reserved_bytes.all.current", 0):
        return None
    torch = allocator_state(cuda, device, with_blocks=False)
    reset = getattr(cuda, "reset_peak_memory_stats", None)
    if reset is not None and not is_profiling():
        reset(device)
    card = card_use(cuda, device)
    shared = {each.name for each in fields(WorkerMemory)} & {each.name for each in fields(AllocatorState)}
    return WorkerMemory(
        rank,
        card.gpu,
        card.used_bytes,
        non_torch_bytes=None if card.own_bytes is None else max(card.own_bytes - torch.reserved_bytes, 0),
        others_bytes=card.others_bytes,
        host_rss_bytes=host.rss_bytes,
        host_pinned_bytes=host.pinned_bytes,
        **{name: getattr(torch, name) for name in shared},
    )


def is_profiling() -> bool:
    """Whether a thread of this process runs vLLM's memory profiling."""
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
    """A card's memory by NVML, split into this process and others."""

    gpu: str
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None


def card_use(cuda: Any, device: int) -> CardUse:
    """Total, used, own and others' bytes of a CUDA device by NVML (matched by UUID); None for each that it hides."""
    from legroom.live.gpu_memory import nvml_devices

    uuid = str(cuda.get_device_properties(device).uuid)
    card = next((gpu for gpu in nvml_devices() if gpu.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-")), None)
    if card is None:
        return CardUse(str(device))
    is_alone = len(card.processes) == 1  # in a container it is listed under another PID
    own = dict(card.processes).get(os.getpid()) or (card.used_bytes if is_alone else None)
    # Not used bytes minus own bytes: the driver reserves a part of the card, 0.6 GiB of an H200.
    rest = [size for pid, size in card.processes if pid != os.getpid()]
    others = 0 if is_alone else sum(rest) if own is not None and all(rest) else None
    return CardUse(str(card.index), card.name, card.total_bytes, card.used_bytes, own, others)
