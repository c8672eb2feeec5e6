"""The memory layout of one GPU, and the start-up checks that fail. Error messages in `facts/data/kv_checks.json`."""

from legroom.facts import read_data
from legroom.facts.releases import Release
from legroom.figures import Figure
from legroom.records import dataclass
from legroom.units import GIB


@dataclass(frozen=True, slots=True)
class Failure:
    """One start-up check that fails."""

    id: str
    """free_memory_lt_requested | weights_too_big | loading_oom | profiling_activation_peak | no_cache_blocks |
    kv_too_small_for_max_len | hybrid_state_cache_limit | kv_allocation_oom | cudagraph_capture_oom |
    runtime_activation_burst | unsupported_kv_cache | host_ram_oom, or the id of an `Unsupported`"""
    message: str
    """The error message of vLLM or torch in that release."""
    needed_bytes: int
    available_bytes: int
    estimated_max_len: int | None = None


@dataclass(frozen=True)
class Layout:
    """The memory of one rank in vLLM's accounting, and outside it."""

    total_bytes: int
    budget_bytes: int
    """gpu_memory_utilization x total."""
    weights: Figure
    activation: Figure
    """Peak of the profile run above the weights."""
    cuda_graph: Figure
    """The CUDA graph estimate that the release subtracts (0 where it has none)."""
    non_torch: Figure
    kv_cache: Figure
    """budget - weights - activation - cuda_graph - non_torch, or kv_cache_memory_bytes. Negative: nothing fits."""
    outside: Figure
    """Memory outside the budget: CUDA context, uncounted graphs, sampler tables, warm-up workspaces."""
    rank: int = 0
    held_by_others_bytes: int = 0
    """Memory of other processes."""
    loading_peak_bytes: int = 0
    """The peak of torch's memory while the weights load."""
    loading_why: str = ""
    desktop_bytes: int = 0
    """What a desktop may use of a card with display outputs."""
    reserve_bytes: int = 0
    """Unified memory: what must stay free for the host."""

    @property
    def peak_used_bytes(self) -> int:
        """Bytes that nvidia-smi shows in use at the peak after start-up."""
        inside = self.weights.bytes + self.activation.bytes + self.cuda_graph.bytes + self.non_torch.bytes
        return inside + max(self.kv_cache.bytes, 0) + self.outside.bytes + self.held_by_others_bytes

    @property
    def headroom_bytes(self) -> int:
        """Free memory of the card at the peak; negative: the server runs out of memory under load."""
        return self.total_bytes - self.peak_used_bytes


def check_text(check: str, release: Release, **values: object) -> str:
    """vLLM's error message, filled with `values`, of the KV cache check of this id; "" where the release lacks it."""
    entries = read_data("kv_checks.json")["checks"]
    entry = next((e for e in entries if e["check"] == check and release.within(e["first"], e["last"])), None)
    if entry is None:
        return ""
    estimate = ""
    if entry.get("estimate") and values.get("estimated_max_len"):
        estimate = str(entry["estimate"]).format(**values)
    return str(entry["text"]).format(estimate=estimate, **values)


def too_long_text(release: Release, needed_bytes: int, available_bytes: int, **tokens: int) -> str:
    """vLLM's error where one request of max_model_len does not fit; `tokens`: the token counts named in its message."""
    needed, available = needed_bytes / GIB, available_bytes / GIB
    if release.at_least("0.14.0"):
        needed, available = round(needed, 2), round(available, 2)
    return check_text("too_long", release, needed_gib=needed, available_gib=available, **tokens)
