"""GPUs: the total CUDA really reports, bandwidth, compute capability. Data in `data/gpus.json`, a source each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or an anonymous card of a given size."""

    name: str
    total_bytes: int
    """What cudaMemGetInfo reports as total, not the figure on the box."""
    bandwidth_bytes_s: float = 0.0
    compute_capability: tuple[int, int] = (0, 0)
    vendor: str = "nvidia"
    unified: bool = False
    """CPU and GPU share one memory (GB10, Jetson, APUs)."""
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    source: str = ""
