"""The memory of a deployment: one layout per pipeline stage, the KV cache, and vLLM's start-up checks in order."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.figures import Certainty, Figure, Term, exact, measured
from legroom.memory import overhead
from legroom.memory.activation.profile_run import activation, activation_cold, first_start_leftover_bytes
from legroom.memory.bands import band_class, banded, kv_band, spare_on_larger_card
from legroom.memory.cudagraph_memory import graph_bytes, graph_estimate
from legroom.memory.kv.kv_plan import KvPlan, kv_plan
from legroom.memory.layout import Failure, Layout
from legroom.memory.weights.loaded import loaded_weights
from legroom.records import dataclass
from legroom.units import GIB, gib
from legroom.vllm.args import EngineSettings
from legroom.vllm.unsupported import Unsupported, unsupported


@dataclass(frozen=True, slots=True)
class Measurements:
    """Figures from the user's own start-ups for one GPU, model and release; None: not measured."""

    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_estimate_bytes: int | None = None
    graph_bytes: int | None = None
    source: str = ""
    profiled_non_torch_bytes: int | None = None
    """Non-torch memory of this exact deployment, including the model runner's buffers."""
    derived: tuple[str, ...] = ()
    """The names of figures that were not printed: they make the KV cache come out as it was."""


@dataclass(frozen=True, slots=True)
class DeploymentMemory:
    """The layout of every stage, the KV cache, and the first check that fails."""

    ranks: tuple[Layout, ...]
    kv: KvPlan
    graphs: Figure
    """The captured CUDA graphs, whether or not the budget counts them."""
    failure: Failure | None
    unsupported: Unsupported | None = None
    """Why the release may not run this, apart from memory."""

    @property
    def refused(self) -> Unsupported | None:
        """Why vLLM refuses these settings; None where it accepts them, or a memory check fails before that."""
        reason = self.unsupported
        return reason if reason and (self.failure is None or self.failure.id == reason.id) else None

    @property
    def tightest(self) -> Layout:
        """The pipeline stage with the smallest KV cache, which limits all."""
        return min(self.ranks, key=lambda rank: rank.kv_cache.bytes)


def deployment_memory(
    model: Model,
    gpu: Gpu,
    settings: EngineSettings,
    seen: Measurements | None = None,
    held_by_others_bytes: int = 0,
    *,
    cold: bool = False,
) -> DeploymentMemory:
    """vLLM's memory accounting of every pipeline stage, and its first failed check; `cold`: with no compile cache."""
    ranks = tuple(
        stage_layout(model, gpu, settings, stage, seen or Measurements(), held_by_others_bytes, cold=cold)
        for stage in range(settings.pipeline_parallel_size)
    )
    kv = kv_plan(model, settings, gpu, [rank.kv_cache.bytes for rank in ranks])
    if kv.shape.is_empty:
        # Bidirectional encoders have no KV cache.
        ranks = tuple(replace(rank, kv_cache=exact(0, "KV cache", "no layer keeps one")) for rank in ranks)
    override = settings.num_gpu_blocks_override
    if override is not None and not kv.shape.is_empty and not kv.shape.era.override_forgotten:
        # The blocks that are asked for are allocated, whatever is left.
        why = f"{override:,} blocks, as given"
        widths = (stage.bytes_per_block for stage in kv.shape.stages)
        ranks = tuple(
            replace(rank, kv_cache=exact(override * width, "num_gpu_blocks_override", why))
            for rank, width in zip(ranks, widths, strict=True)
        )
    graphs = _measured_or("graph_bytes", graph_bytes(model, settings, gpu), seen or Measurements())
    refused = unsupported(settings, model, gpu)
    if refused and refused.certain:
        failure: Failure | None = Failure(refused.id, refused.message, 0, 0)
    else:
        free = free_at_start(model, settings, gpu, held_by_others_bytes)
        failure = first_failure(ranks, kv, graphs, settings, gpu, free)
    # A measured start proves that the release runs it.
    return DeploymentMemory(ranks, kv, graphs, failure, None if seen else refused)


def stage_layout(
    model: Model,
    gpu: Gpu,
    settings: EngineSettings,
    stage: int,
    seen: Measurements,
    held_by_others_bytes: int,
    *,
    cold: bool,
) -> Layout:
    """A pipeline stage's memory layout per GPU; `seen` replaces computed figures; `cold`: an empty compile cache."""
    profile_run = activation_cold if cold else activation
    loaded = loaded_weights(model, settings, gpu, stage)
    budget = budget_bytes(gpu, settings)
    of = band_class(model, settings, gpu)
    weights = banded("weights", _measured_or("weights_bytes", loaded.figure, seen), of, gpu)
    beside = "non_torch_bytes" if seen.profiled_non_torch_bytes is None else "profiled_non_torch_bytes"
    rules = {
        "activation": _measured_or("activation_bytes", profile_run(model, settings, gpu, stage), seen),
        "cuda_graph": _measured_or("graph_estimate_bytes", graph_estimate(model, settings, gpu), seen),
        "non_torch": _measured_or(beside, overhead.non_torch(model, settings, gpu, stage), seen),
    }
    parts = {name: banded(name, rule, of, gpu) for name, rule in rules.items()}
    first_start = 0
    if rules["activation"].kind == "estimated":
        # Where nobody said whether the compile cache is empty, the bands hold both.
        first_start = activation_cold(model, settings, gpu, stage).bytes - rules["activation"].bytes
        parts["activation"] = replace(parts["activation"], high=parts["activation"].high + first_start)
        first_start += first_start_leftover_bytes(model, settings, gpu, stage)
    left = kv_band((weights, *rules.values()), of, settings, gpu, first_start)
    return Layout(
        gpu.total_bytes,
        budget,
        weights=weights,
        **parts,
        kv_cache=kv_cache_figure(
            budget,
            (weights, *parts.values()),
            left,
            settings,
            neighbours_bytes=held_by_others_bytes if overhead.charges_device_wide(settings) else 0,
        ),
        outside=banded("outside", overhead.outside(model, settings, gpu, stage), of, gpu),
        rank=stage,
        held_by_others_bytes=held_by_others_bytes,
        desktop_bytes=overhead.desktop_bytes(gpu),
        reserve_bytes=overhead.reserve_bytes(gpu),
        loading_peak_bytes=loaded.peak_bytes,
        loading_why=loaded.why,
    )


def budget_bytes(gpu: Gpu, settings: EngineSettings) -> int:
    """gpu_memory_utilization x total: rounded up from 0.14.0 on, truncated before."""
    budget = gpu.total_bytes * settings.gpu_memory_utilization
    return math.ceil(budget) if settings.release.at_least("0.14.0") else int(budget)


def kv_cache_figure(
    budget: int, parts: tuple[Figure, ...], band: tuple[int, int], settings: EngineSettings, neighbours_bytes: int
) -> Figure:
    """The KV cache: kv_cache_memory_bytes if given, else budget less `parts` and neighbours; `band`: (below, above)."""
    if settings.kv_cache_memory_bytes is not None:
        return exact(settings.kv_cache_memory_bytes, "kv_cache_memory_bytes", "as given; utilization is ignored")
    left = budget - sum(part.bytes for part in parts) - neighbours_bytes
    kinds = {part.kind for part in parts}
    kind: Certainty = "estimated" if "estimated" in kinds else "measured" if kinds != {"exact"} else "exact"
    names = ("weights", "activation peak", "CUDA-graph estimate", "non-torch")
    counted = (Term(name, -part.bytes) for name, part in zip(names, parts, strict=True))
    others = Term("other processes", -neighbours_bytes, "this release charges all that the card holds")
    terms = (Term("budget", budget, "utilization x total"), *counted, *((others,) if neighbours_bytes else ()))
    return Figure(left, kind, left - band[0], left + band[1], terms)


def _measured_or(name: str, computed: Figure, seen: Measurements) -> Figure:
    """The value of `seen`'s field `name` as a figure, measured or derived; `computed` where that field is None."""
    if (bytes_ := getattr(seen, name)) is None:
        return computed
    kind: Certainty = "derived" if name in seen.derived else "measured"
    label = computed.terms[0].label if computed.terms else kind
    return replace(measured(bytes_, label, f"{kind}: {seen.source}"), kind=kind)


def first_failure(
    ranks: Sequence[Layout], kv: KvPlan, graphs: Figure, settings: EngineSettings, gpu: Gpu, free_bytes: int
) -> Failure | None:
    """The first start-up check of vLLM that fails, in its order, or None; `free_bytes`: the card's before the start."""
    return (
        _startup_check(ranks[0], free_bytes, settings, gpu)
        or _first_of(_weights_load(rank, free_bytes, gpu) for rank in ranks)
        or _first_of(_profile_run(rank, free_bytes, gpu) for rank in ranks)
        or kv.failure
        or _first_of(_graph_capture(rank, graphs, free_bytes, gpu) for rank in ranks)
        or _first_of(_serving_peak(rank, gpu) for rank in ranks)
    )


def failure_at_best(
    model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory, held_by_others_bytes: int
) -> Failure | None:
    """The first start-up check that fails even with every figure at the favourable end of its error band, or None."""
    free = gpu.total_bytes - overhead.held_at_start(model, settings, gpu).low - held_by_others_bytes
    larger = spare_on_larger_card(settings, gpu)
    pools = [max(rank.kv_cache.bytes, rank.kv_cache.high - larger) for rank in memory.ranks]
    best = [_at_best(rank, pool) for rank, pool in zip(memory.ranks, pools, strict=True)]
    graphs = replace(memory.graphs, bytes=memory.graphs.low)
    return first_failure(best, kv_plan(model, settings, gpu, pools), graphs, settings, gpu, free)


def _at_best(rank: Layout, kv_bytes: int) -> Layout:
    """The layout with the lightest weights of their band, and an activation peak that leaves `kv_bytes` for KV."""
    lighter = rank.weights.bytes - rank.weights.low
    activation = max(0, rank.activation.bytes - max(0, kv_bytes - rank.kv_cache.bytes - lighter))
    weights, peak = replace(rank.weights, bytes=rank.weights.low), rank.loading_peak_bytes - lighter
    active = replace(rank.activation, bytes=activation, low=min(activation, rank.activation.low))
    return replace(rank, weights=weights, activation=active, loading_peak_bytes=peak)


def free_at_start(model: Model, settings: EngineSettings, gpu: Gpu, held_by_others_bytes: int) -> int:
    """Free bytes of the card at vLLM's first memory snapshot, when others hold `held_by_others_bytes`."""
    return gpu.total_bytes - overhead.held_at_start(model, settings, gpu).bytes - held_by_others_bytes


def _first_of(failures: Iterable[Failure | None]) -> Failure | None:
    """The first failure among the results of several checks; None where every check passed."""
    return next(filter(None, failures), None)


def _startup_check(rank: Layout, free: int, settings: EngineSettings, gpu: Gpu) -> Failure | None:
    """The failure of vLLM's check (0.9.1+) that free memory covers the budget; None where it passes."""
    if not settings.release.at_least("0.9.1") or free >= rank.budget_bytes:
        return None
    device = "device cuda:0 " if settings.release.at_least("0.14.0") else "device "
    return Failure(
        "free_memory_lt_requested",
        f"Free memory on {device}({free / GIB:.2f}/{gpu.total_bytes / GIB:.2f} GiB) on startup is less than desired "
        f"GPU memory utilization ({settings.gpu_memory_utilization}, {rank.budget_bytes / GIB:.2f} GiB). Decrease GPU "
        "memory utilization or reduce GPU memory used by other processes.",
        rank.budget_bytes,
        free,
    )


def _weights_load(rank: Layout, free_bytes: int, gpu: Gpu) -> Failure | None:
    """The out-of-memory failure while loading; None where weights and loading peak fit into the free bytes."""
    staged = overhead.loader_bytes(gpu, rank.weights.bytes)
    needed, peak = rank.weights.bytes + staged, rank.loading_peak_bytes + staged
    if needed > free_bytes:
        return Failure("weights_too_big", _oom_text(gpu, "while loading the weights"), needed, free_bytes)
    if peak > free_bytes:
        return Failure("loading_oom", _oom_text(gpu, f"while loading: {rank.loading_why}"), peak, free_bytes)
    return None


def _profile_run(rank: Layout, free_bytes: int, gpu: Gpu) -> Failure | None:
    """The out-of-memory failure in the profile run; None where its peak fits into the free bytes."""
    needed = rank.weights.bytes + rank.activation.bytes + rank.non_torch.bytes
    if needed <= free_bytes:
        return None
    return Failure("profiling_activation_peak", _oom_text(gpu, "in the profile run"), needed, free_bytes)


def _graph_capture(rank: Layout, graphs: Figure, free_bytes: int, gpu: Gpu) -> Failure | None:
    """The out-of-memory failure of KV cache allocation or graph capture; None where both fit into the free bytes."""
    needed = rank.weights.bytes + max(rank.kv_cache.bytes, 0) + rank.non_torch.bytes + graphs.bytes
    if needed <= free_bytes:
        return None
    if graphs.bytes == 0 or needed - graphs.bytes > free_bytes:
        return Failure("kv_allocation_oom", _oom_text(gpu, "while allocating the KV cache"), needed, free_bytes)
    return Failure("cudagraph_capture_oom", _oom_text(gpu, "while capturing CUDA graphs"), needed, free_bytes)


def _serving_peak(rank: Layout, gpu: Gpu) -> Failure | None:
    """The failure if even the least serving peak exceeds the card; None on unified memory, where the system swaps."""
    least = rank.peak_used_bytes - rank.held_by_others_bytes - (rank.outside.bytes - rank.outside.low)
    if least <= gpu.total_bytes or gpu.unified:
        return None
    return Failure("runtime_activation_burst", _oom_text(gpu, "at the first large batch"), least, gpu.total_bytes)


def _oom_text(gpu: Gpu, when: str) -> str:
    """torch's out-of-memory message for the GPU's runtime (CUDA, HIP, XPU); `when` (in brackets): the start-up step."""
    runtime = {"amd": "HIP", "intel": "XPU"}.get(gpu.vendor, "CUDA")
    total = gib(gpu.total_bytes)
    return f"torch.OutOfMemoryError: {runtime} out of memory ({when}). GPU 0 has a total capacity of {total}"
