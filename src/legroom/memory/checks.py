"""The checks vLLM makes while it starts, in its order, with its words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from legroom.facts.releases import release as known_release
from legroom.memory.layout import Failure
from legroom.memory.overhead import held_at_start
from legroom.memory.unified import loader_bytes
from legroom.units import GIB, gib

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.figures import Figure
    from legroom.memory.kv.plan import KvPlan
    from legroom.memory.layout import Layout
    from legroom.vllm.args import EngineSettings
    from legroom.vllm.refusals import Unsupported


def first_failure(
    ranks: Sequence[Layout],
    kv: KvPlan,
    graphs: Figure,
    settings: EngineSettings,
    *,
    gpu: Gpu,
    held_by_others_bytes: int = 0,
) -> Failure | None:
    """The check that ends the start-up, or None."""
    free = free_at_start(settings, gpu, held_by_others_bytes)
    return (
        _free_at_start(ranks[0], free, settings, gpu)
        or _first(_weights_load(rank, free, gpu) for rank in ranks)
        or _first(_profile_run(rank, free, gpu) for rank in ranks)
        or kv.failure
        or _first(_after_kv(rank, graphs, free, settings, gpu) for rank in ranks)
    )


def refused_by_release(refused: Unsupported | None) -> Failure | None:
    """What no amount of memory would change."""
    return Failure(refused.id, refused.message, 0, 0) if refused and refused.certain else None


def free_at_start(settings: EngineSettings, gpu: Gpu, held_by_others_bytes: int = 0) -> int:
    """What is free when vLLM first looks: the CUDA context, and NCCL where it starts first, are gone already."""
    return gpu.total_bytes - held_at_start(settings, gpu).bytes - held_by_others_bytes


def _first(failures: Iterable[Failure | None]) -> Failure | None:
    return next((failure for failure in failures if failure), None)


def _free_at_start(rank: Layout, free: int, settings: EngineSettings, gpu: Gpu) -> Failure | None:
    """0.9.1+ refuses to start when the free memory is below the budget, even when KV bytes are given."""
    release = known_release(settings.release)
    if not release.at_least("0.9.1") or free >= rank.budget_bytes:
        return None
    device = "device cuda:0 " if release.at_least("0.14.0") else "device "
    return Failure(
        "free_memory_lt_requested",
        f"Free memory on {device}({free / GIB:.2f}/{gpu.total_bytes / GIB:.2f} GiB) on startup is less than desired "
        f"GPU memory utilization ({settings.gpu_memory_utilization}, {rank.budget_bytes / GIB:.2f} GiB). Decrease GPU "
        "memory utilization or reduce GPU memory used by other processes.",
        rank.budget_bytes,
        free,
    )


def _weights_load(rank: Layout, free: int, gpu: Gpu) -> Failure | None:
    staged = loader_bytes(gpu, rank.weights.bytes)
    needed, peak = rank.weights.bytes + staged, rank.loading_peak_bytes + staged
    if needed > free:
        return Failure("weights_too_big", _oom(gpu, "while loading the weights"), needed, free)
    if peak > free:
        return Failure("loading_oom", _oom(gpu, f"while loading: {rank.loading_why}"), peak, free)
    return None


def _profile_run(rank: Layout, free: int, gpu: Gpu) -> Failure | None:
    needed = rank.weights.bytes + rank.activation.bytes + rank.non_torch.bytes
    if needed <= free:
        return None
    return Failure("profiling_activation_peak", _oom(gpu, "in the profile run"), needed, free)


def _after_kv(rank: Layout, graphs: Figure, free: int, settings: EngineSettings, gpu: Gpu) -> Failure | None:
    """With the pool in place, graph capture must still find room: the activation peak is free again by then."""
    needed = rank.weights.bytes + max(rank.kv_cache.bytes, 0) + rank.non_torch.bytes + graphs.bytes
    if needed <= free:
        return None
    if graphs.bytes == 0:
        return Failure("kv_allocation_oom", _oom(gpu, "while allocating the KV cache"), needed, free)
    return Failure("cudagraph_capture_oom", _oom(gpu, "while capturing CUDA graphs"), needed, free)


def _oom(gpu: Gpu, when: str) -> str:
    return f"torch.OutOfMemoryError: CUDA out of memory ({when}). GPU 0 has a total capacity of {gib(gpu.total_bytes)}"
