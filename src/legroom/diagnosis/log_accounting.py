"""vLLM's accounting with the numbers that a log prints: what a fix can be held against where the model is not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.diagnosis.case import Case

_OTHER_WEIGHTS = frozenset(
    {
        "model", "quantization", "tensor_parallel_size", "pipeline_parallel_size", "cpu_offload_gb",
        "enable_expert_parallel", "speculative_config", "kv_cache_memory_bytes", "num_gpu_blocks_override",
    }
)  # fmt: skip
"""With one of these changed, the weights or the way the pool is sized are no longer those of the log."""


@dataclass(frozen=True, slots=True)
class LogAccounting:
    """The parts of the budget as they were measured; None where the log does not say."""

    total_bytes: int | None
    share: float
    free_bytes: int | None
    """On the card before vLLM took anything."""
    weights_bytes: int | None
    """Of the fullest rank."""
    peak_bytes: int | None
    non_torch_bytes: int | None
    pool_bytes: int | None
    """What was left for the KV cache, below zero too."""

    @property
    def weights_over_budget_bytes(self) -> int:
        """How far the weights alone are above share x total; 0 where they are not, or the log does not say."""
        if self.total_bytes is None or self.weights_bytes is None:
            return 0
        return max(self.weights_bytes - round(self.share * self.total_bytes), 0)

    def pool_at(self, share: float) -> int | None:
        """The KV pool at another share of the card; at most this much where a part was not printed."""
        if self.total_bytes is None:
            return None
        if self.pool_bytes is not None:
            return self.pool_bytes + round((share - self.share) * self.total_bytes)
        if self.weights_bytes is None:
            return None
        counted = self.weights_bytes + (self.peak_bytes or 0) + (self.non_torch_bytes or 0)
        return round(share * self.total_bytes) - counted

    def refuses(self, flags: Mapping[str, Any]) -> bool:
        """Whether these numbers already show that a server with such flags does not start."""
        if self.total_bytes is None or flags.keys() & _OTHER_WEIGHTS:
            return False
        share = flags.get("gpu_memory_utilization") or self.share
        pool = self.pool_at(share)
        smaller_peak = flags.keys() & {"max_num_seqs", "max_num_batched_tokens", "limit_mm_per_prompt", "enforce_eager"}
        if smaller_peak:
            return self.weights_bytes is not None and self.total_bytes * share <= self.weights_bytes
        above_free = self.free_bytes is not None and round(share * self.total_bytes) > self.free_bytes
        return (pool is not None and pool <= 0) or (above_free and "gpu_memory_utilization" in flags)


def log_accounting(case: Case, share: float, total_bytes: int | None) -> LogAccounting:
    """The accounting of one run."""
    startup = case.startup
    check = case.first("free_below_desired")
    free = check.facts.get("free_bytes") if check else startup.free_at_start_bytes
    error = case.first("kv_bytes_short")
    pool = error.facts.get("available_bytes") if error else startup.available_kv_bytes
    return LogAccounting(
        total_bytes, share, free if isinstance(free, int) else None, startup.weights_bytes or None,
        startup.activation_bytes, startup.non_torch_bytes,
        pool if isinstance(pool, int) and not startup.explicit_kv else None,
    )  # fmt: skip
