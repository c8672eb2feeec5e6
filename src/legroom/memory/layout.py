"""Where every byte of one GPU goes."""

from __future__ import annotations

from legroom.figures import Figure
from legroom.records import dataclass


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
