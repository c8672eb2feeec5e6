"""PyTorch's caching allocator as the process itself can read it: its counters, and its segments with their blocks.

Both are copies that the allocator makes of its own books under its lock; neither calls CUDA.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from legroom.black_box import AllocatorSegment, AllocatorState, BlockState, SegmentBlock
from legroom.records import dataclass

CONF_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COMMON_POOL = (0, 0)
_PACE = 2000.0
"""Times what listing the segments took, until they are listed again: 3 ms make it six seconds."""
_STATES: dict[str, BlockState] = {"active_allocated": "allocated", "inactive": "free"}
"""PyTorch's names; a block that waits for a stream has one of several others."""


@dataclass(frozen=True)
class SegmentSums:
    """What the segments add up to; None where the build does not list them."""

    largest_free_bytes: int | None = None
    graph_pool_bytes: int | None = None
    private_pool_bytes: int | None = None
    private_free_bytes: int | None = None
    has_expandable_segments: bool | None = None

    @classmethod
    def of(cls, segments: tuple[AllocatorSegment, ...]) -> SegmentSums:
        if not segments:
            return cls()
        private = [segment for segment in segments if segment.pool]
        return cls(
            max((segment.largest_free_bytes for segment in segments if not segment.pool), default=None),
            sum(segment.size_bytes for segment in private if segment.pool == "graph"),
            sum(segment.size_bytes for segment in private),
            sum(segment.size_bytes - segment.allocated_bytes for segment in private),
            any(segment.is_expandable for segment in segments),
        )


class PacedSums:
    """The sums over a device's segments, listed no more often than costs a two-thousandth of the time.

    Python makes objects of every block while it holds its lock, milliseconds where there are hundreds of them, and
    the model's own thread waits.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept: dict[int, tuple[float, SegmentSums]] = {}

    def read(self, cuda: Any, device: int) -> SegmentSums:
        began_s = self._clock()
        due_s, sums = self._kept.get(device, (began_s, SegmentSums()))
        if began_s < due_s:
            return sums
        sums = SegmentSums.of(_segments(cuda, device, with_blocks=False))
        ended_s = self._clock()
        self._kept[device] = ended_s + _PACE * (ended_s - began_s), sums
        return sums


_PACED = PacedSums()


def allocator_state(cuda: Any, device: int, *, with_blocks: bool) -> AllocatorState:
    """What the allocator holds of a device; with all blocks, or with the sums over them alone."""
    counts = cuda.memory_stats(device)
    segments = _segments(cuda, device, with_blocks=True) if with_blocks else ()
    sums = SegmentSums.of(segments) if with_blocks else _PACED.read(cuda, device)
    return AllocatorState(
        allocated_bytes=int(counts.get("allocated_bytes.all.current", 0)),
        reserved_bytes=int(counts.get("reserved_bytes.all.current", 0)),
        active_bytes=_count(counts, "active_bytes.all.current"),
        inactive_split_bytes=_count(counts, "inactive_split_bytes.all.current"),
        largest_free_bytes=sums.largest_free_bytes,
        graph_pool_bytes=sums.graph_pool_bytes,
        private_pool_bytes=sums.private_pool_bytes,
        private_free_bytes=sums.private_free_bytes,
        peak_allocated_bytes=_count(counts, "allocated_bytes.all.peak"),
        alloc_retries=_count(counts, "num_alloc_retries"),
        ooms=_count(counts, "num_ooms"),
        settings=next((value for name in CONF_NAMES if (value := os.environ.get(name))), None),
        has_expandable_segments=sums.has_expandable_segments,
        segments=segments,
    )


def _count(counts: dict[str, Any], name: str) -> int | None:
    value = counts.get(name)
    return None if value is None else int(value)


def _segments(cuda: Any, device: int, *, with_blocks: bool) -> tuple[AllocatorSegment, ...]:
    snapshot = getattr(cuda, "memory_snapshot", None)
    if snapshot is None:
        return ()
    graph_pool = _graph_pool()
    own = [segment for segment in snapshot() if segment.get("device", device) == device]
    return tuple(_segment(segment, graph_pool, with_blocks=with_blocks) for segment in own)


def _segment(segment: dict[str, Any], graph_pool: tuple[int, ...] | None, *, with_blocks: bool) -> AllocatorSegment:
    blocks = segment.get("blocks", ())
    largest = max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
    pool = tuple(segment.get("segment_pool_id", _COMMON_POOL))
    return AllocatorSegment(
        size_bytes=int(segment["total_size"]),
        allocated_bytes=int(segment.get("allocated_size", 0)),
        largest_free_bytes=int(largest),
        pool=_pool_name(pool, graph_pool),
        is_small=segment.get("segment_type") == "small",
        is_expandable=bool(segment.get("is_expandable", False)),
        blocks=tuple(SegmentBlock(int(block["size"]), _STATES.get(block["state"], "pending")) for block in blocks)
        if with_blocks
        else (),
    )


def _pool_name(pool: tuple[int, ...], graph_pool: tuple[int, ...] | None) -> str:
    """Sleep mode keeps weights and the KV cache in private pools too; vLLM 0.10 on tells which one its graphs have."""
    if pool == _COMMON_POOL:
        return ""
    return "graph" if graph_pool is None or pool == graph_pool else ":".join(map(str, pool))


def _graph_pool() -> tuple[int, ...] | None:
    platform = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    handle = getattr(platform, "_global_graph_pool", None)
    return tuple(handle) if handle is not None else None
