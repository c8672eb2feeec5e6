"""Where every byte of one GPU goes."""

from __future__ import annotations

from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.releases import Release
from legroom.figures import Figure
from legroom.records import dataclass
from legroom.units import GIB


@dataclass(frozen=True, slots=True)
class Failure:
    """One start-up check that will fail."""

    id: str
    """free_memory_lt_requested | weights_too_big | loading_oom | profiling_activation_peak | no_cache_blocks |
    kv_too_small_for_max_len | hybrid_state_cache_limit | cudagraph_capture_oom | block_size_rule"""
    message: str
    """What vLLM (or torch) will say, in that release's words."""
    needed_bytes: int
    available_bytes: int
    estimated_max_len: int | None = None


@dataclass(frozen=True)
class Layout:
    """The memory of one rank, in vLLM's own accounting, and what the card will show beside it."""

    total_bytes: int
    budget_bytes: int
    """What the release plans with: utilization x total."""
    weights: Figure
    activation: Figure
    """Peak of the profile run above the weights."""
    cuda_graph: Figure
    """What the release subtracts for CUDA graphs (0 where it estimates none)."""
    non_torch: Figure
    kv_cache: Figure
    """budget - weights - activation - cuda_graph - non_torch, or the explicit bytes. Negative: nothing fits."""
    outside: Figure
    """Used beside the budget: CUDA context, uncounted graphs, sampler tables, warm-up workspaces."""
    rank: int = 0
    held_by_others_bytes: int = 0
    """What other processes hold of the card."""
    loading_peak_bytes: int = 0
    """The most that torch holds while the weights load: before vLLM profiles, and apart from its budget."""
    loading_why: str = ""
    desktop_bytes: int = 0
    """What a desktop may hold of a card that has outputs for a screen; nobody has said whether there is one."""
    reserve_bytes: int = 0
    """What must stay free of a memory that the host shares."""

    @property
    def peak_used_bytes(self) -> int:
        """What nvidia-smi will show at the worst moment after start-up."""
        inside = self.weights.bytes + self.activation.bytes + self.cuda_graph.bytes + self.non_torch.bytes
        return inside + max(self.kv_cache.bytes, 0) + self.outside.bytes + self.held_by_others_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the card at the peak; below zero, the server dies in a burst."""
        return self.total_bytes - self.peak_used_bytes


@cache
def _checks() -> tuple[dict[str, Any], ...]:
    return tuple(read_data("kv_checks.json")["checks"])


def check_text(check: str, release: Release, **values: object) -> str:
    """The words of one check in one release, with its numbers; empty where the release has no such check."""
    entry = next((e for e in _checks() if e["check"] == check and release.within(e["first"], e["last"])), None)
    if entry is None:
        return ""
    estimate = ""
    if entry.get("estimate") and values.get("estimated_max_len"):
        estimate = str(entry["estimate"]).format(**values)
    return str(entry["text"]).format(estimate=estimate, **values)


def too_long_text(
    release: Release,
    max_model_len: int,
    needed_bytes: int,
    available_bytes: int,
    *,
    estimated_max_len: int,
    capacity: int,
) -> str:
    """One request of the full length does not fit. 0.14+ rounds the figures, earlier releases write two places."""
    needed, available = needed_bytes / GIB, available_bytes / GIB
    if release.at_least("0.14.0"):
        needed, available = round(needed, 2), round(available, 2)
    return check_text(
        "too_long",
        release,
        max_model_len=max_model_len,
        needed_gib=needed,
        available_gib=available,
        estimated_max_len=estimated_max_len,
        capacity=capacity,
    )
