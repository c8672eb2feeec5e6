"""PyTorch's caching allocator as the process itself can read it: its counters, and its segments with their blocks.

Both are copies that the allocator makes of its own books under its lock; neither calls CUDA.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from legroom.black_box import AllocatorBlock, AllocatorSegment, AllocatorState, BlockState

CONF_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COMMON_POOL = (0, 0)
_STATES: dict[str, BlockState] = {"active_allocated": "allocated", "inactive": "free"}
"""PyTorch's names; a block that waits for a stream has one of several others."""


def allocator_state(cuda: Any, device: int, *, with_blocks: bool) -> AllocatorState:
    """What the allocator holds of a device; with all blocks, or with the sums over them alone."""
    counts = cuda.memory_stats(device)
    segments = _segments(cuda, device, with_blocks=with_blocks)
    common = [segment for segment in segments if not segment.pool]
    private = [segment for segment in segments if segment.pool]
    graphs = [segment for segment in private if segment.pool == "graph"]
    conf = next((value for name in CONF_NAMES if (value := os.environ.get(name))), None)
    return AllocatorState(
        allocated_bytes=int(counts.get("allocated_bytes.all.current", 0)),
        reserved_bytes=int(counts.get("reserved_bytes.all.current", 0)),
        active_bytes=_count(counts, "active_bytes.all.current"),
        inactive_split_bytes=_count(counts, "inactive_split_bytes.all.current"),
        largest_free_bytes=max((segment.largest_free_bytes for segment in common), default=None),
        graph_pool_bytes=sum(segment.size_bytes for segment in graphs) if segments else None,
        private_pool_bytes=sum(segment.size_bytes for segment in private) if segments else None,
        private_free_bytes=sum(segment.size_bytes - segment.allocated_bytes for segment in private)
        if segments
        else None,
        peak_allocated_bytes=_count(counts, "allocated_bytes.all.peak"),
        alloc_retries=_count(counts, "num_alloc_retries"),
        ooms=_count(counts, "num_ooms"),
        settings=conf,
        has_expandable_segments=any(segment.is_expandable for segment in segments) if segments else None,
        segments=segments if with_blocks else (),
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
        blocks=tuple(AllocatorBlock(int(block["size"]), _STATES.get(block["state"], "pending")) for block in blocks)
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
