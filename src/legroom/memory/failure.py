"""Why a server will not start: vLLM's check, its words, its numbers."""

from __future__ import annotations

from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One start-up check that will fail."""

    id: str
    """free_memory_lt_requested | weights_too_big | profiling_activation_peak | no_cache_blocks |
    kv_too_small_for_max_len | hybrid_state_cache_limit | cudagraph_capture_oom | block_size_rule"""
    message: str
    """What vLLM (or torch) will say, in that release's words."""
    needed_bytes: int
    available_bytes: int
    estimated_max_len: int | None = None
