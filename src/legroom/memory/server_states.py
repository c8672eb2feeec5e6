"""A server's memory by state: serving, asleep at level 1 or 2, and during a weight update.

Sleep mode allocates weights and KV cache in a pool whose pages can be unmapped while their addresses stay. Everything
outside that pool stays on the card: the CUDA context, modules and library handles, communication buffers, CUDA graphs
and, before 0.24, the buffers of the model runner. Level 1 copies the weights to pinned host memory, one allocator
segment at a time, each rounded up to a power of two; level 2 discards them."""

from collections.abc import Iterator, Sequence
from typing import Literal

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.release_support import SleepRules, first_release_with_sleep, host_bandwidth_bytes_s, sleep_rules
from legroom.figures import Figure, Term, exact
from legroom.memory import overhead
from legroom.memory.activation.layer_peaks import expert_scratch
from legroom.memory.activation.profile_run import cublas_workspace, sampling
from legroom.memory.attention_workspace import flashinfer_workspace
from legroom.memory.caching_allocator import CachingAllocator
from legroom.memory.deployment_memory import DeploymentMemory
from legroom.memory.dtypes import INT32_BYTES, dtype_bytes
from legroom.memory.host_needs import pinned_bytes
from legroom.memory.layout import Layout
from legroom.memory.runner_buffers import runner_buffers, sampler_tables
from legroom.memory.weights.loaded import buffer_bytes, unused_bytes, weight_segments
from legroom.records import dataclass
from legroom.vllm.args import EngineSettings, is_given

StateName = Literal["serving", "asleep_1", "asleep_2", "updating_weights"]


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server's memory in one state, on the card and on the host (beyond its processes)."""

    name: StateName
    device: Figure
    """On the fullest card."""
    host: Figure
    """For all ranks on one host."""
    wake_s: float | None = None
    """Seconds to wake up; None where nothing is copied back or the weights are read from files."""


def server_states(
    model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory, host_bytes_s: float | None = None
) -> tuple[ServerState, ...]:
    """The memory of a server with --enable-sleep-mode awake, asleep at each level and while it updates weights.
    LegroomError if the release has no sleep mode; `host_bytes_s`: copy speed from the host, None: the usual one."""
    rules = sleep_rules(settings.release)
    if rules is None:
        hint = f"it came with {first_release_with_sleep()}: name a later one"
        raise LegroomError(f"vLLM {settings.release} has no sleep mode", hint)
    rank = max(memory.ranks, key=lambda layout: layout.weights.bytes)
    stays = residue(model, gpu, settings, memory.graphs, rank.rank)
    loaded = weight_segments(model, settings, gpu, rank.rank)
    tables = _segment_sizes(_sampler_sizes(rules, model, settings))
    kept = [*_offloaded_segments(rules, model, gpu, settings, memory)]
    saved = buffer_bytes(model, settings, gpu, rank.rank) if rules.buffers_saved else 0
    ranks = settings.gpus_used
    pinned = _host_figure(
        Term("weights", _pinned(loaded) * ranks, "page-locked, a segment at a time, rounded up to a power of two"),
        Term("tables of the sampler", _pinned(tables) * ranks, "in the same pool"),
        Term("buffers of the runner", _pinned(kept) * ranks, "page-locked, too"),
    )
    dropped = _host_figure(
        Term("buffers of the model", saved * ranks, "copied before the pool is emptied"),
        Term("buffers of the runner", _pinned(kept) * ranks, "page-locked"),
    )
    back = exact(sum(loaded), "weights", "as loaded, in whole segments of torch's pool")
    if tables or kept:
        back += exact(sum(tables) + sum(kept), "tables of the model runner", "back with the weights")
    back += exact(max(loaded, default=0), "one tensor", "as it arrives, before it is copied into its place")
    speed = host_bytes_s or host_bandwidth_bytes_s(gpu)
    return (
        ServerState("serving", serving(rank), exact(0, "nothing", "until it has slept once")),
        ServerState("asleep_1", stays, pinned, sum((*loaded, *tables, *kept)) / speed),
        ServerState("asleep_2", stays, dropped),
        ServerState("updating_weights", stays + back, exact(0, "nothing", "the pool for KV stays empty")),
    )


def _host_figure(*terms: Term) -> Figure:
    """A figure of host memory with the sum of these terms; it lists those above 0 bytes."""
    return Figure(sum(term.bytes for term in terms), terms=tuple(term for term in terms if term.bytes))


def _pinned(segment_sizes: Sequence[int]) -> int:
    """Bytes of page-locked memory for segments of these bytes, each rounded up to a power of two as in torch."""
    return sum(pinned_bytes(size) for size in segment_sizes)


def serving(rank: Layout) -> Figure:
    """A card's memory at the server's peak while awake, without neighbours, with the error band of its parts."""
    own = rank.peak_used_bytes - rank.held_by_others_bytes
    return Figure(
        own,
        "estimated" if rank.outside.kind == "estimated" else "exact",
        own - (rank.outside.bytes - rank.outside.low),
        own + (rank.outside.high - rank.outside.bytes),
        (
            Term("weights", rank.weights.bytes),
            Term("KV cache", max(rank.kv_cache.bytes, 0)),
            Term("the rest", own - rank.weights.bytes - max(rank.kv_cache.bytes, 0), "activation, graphs, context"),
        ),
    )


def residue(model: Model, gpu: Gpu, settings: EngineSettings, graphs: Figure, stage: int = 0) -> Figure:
    """The memory that a sleeping server keeps on a card; `graphs`: its captured CUDA graphs."""
    rules = sleep_rules(settings.release)
    charged = overhead.non_torch(model, settings, gpu, stage)
    context = overhead.held_at_start(model, settings, gpu)
    # The tables are counted below, and the rests of the weights' segments sleep with the weights.
    elsewhere = sampler_tables(model, settings) + unused_bytes(model, settings, gpu, (), stage)
    tables = elsewhere if overhead.counts_runner_buffers(settings) else 0
    is_offloaded = rules is not None and rules.runtime_offloaded
    kept_tables = sampler_tables(model, settings) if is_offloaded else runner_buffers(model, settings, gpu)
    kept_tables -= sum(_sampler_sizes(rules, model, settings))
    # Device-wide accounting has the context in the charged part already.
    outside = 0 if overhead.charges_device_wide(settings) else context.bytes
    terms = [
        Term("CUDA context", outside, "a process that lives has one"),
        Term("modules and handles", charged.bytes - tables, "kernels, libraries, communication"),
        Term("tables of the model runner", kept_tables, "allocated outside the pool"),
        Term("workspaces", _workspaces(rules, model, gpu, settings), "cuBLAS, the sampler, experts"),
    ]
    if not (rules and rules.graphs_flag and is_given(settings.given, rules.graphs_flag)):
        terms.append(Term("CUDA graphs", graphs.bytes, "they stay, and are valid when it wakes"))
    if rules and rules.communication_flag and is_given(settings.given, rules.communication_flag):
        nccl = overhead.nccl_before_snapshot(model, settings, gpu)
        suspended = overhead.communication_bytes(settings, gpu) + (nccl.bytes if nccl else 0)
        terms.append(Term("suspended communication", -suspended, rules.communication_flag))
    size = sum(term.bytes for term in terms)
    # The sampler tables are exact, so they do not count to the error of the charged part.
    charged_spread = (charged.high - charged.bytes) * (charged.bytes - tables) // max(charged.bytes, 1)
    spread = charged_spread + (context.high - context.bytes) + (graphs.high - graphs.bytes)
    return Figure(size, "estimated", max(0, size - spread), size + spread, tuple(term for term in terms if term.bytes))


def _workspaces(rules: SleepRules | None, model: Model, gpu: Gpu, settings: EngineSettings) -> int:
    """Bytes of workspaces that stay on the GPU while the server sleeps: cuBLAS, sampler, FlashInfer, experts."""
    kept = cublas_workspace(gpu) + sampling(model, settings, gpu).kept_bytes
    if rules and rules.runtime_offloaded:
        return kept
    kept += flashinfer_workspace(model, settings, gpu)
    return kept + expert_scratch(model, settings, gpu).kept_elements * dtype_bytes(settings.dtype)


def _sampler_sizes(rules: SleepRules | None, model: Model, settings: EngineSettings) -> tuple[int, ...]:
    """Bytes of the sampler's tables in the weights' sleep pool, as (token counts, all others); else empty."""
    every = sampler_tables(model, settings)
    if not (rules and rules.sampler_pooled and settings.runner == "V2" and every):
        return ()
    counts = settings.max_num_seqs * model.vocab_size * INT32_BYTES
    return (counts, every - counts)


def _offloaded_segments(
    rules: SleepRules, model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory
) -> Iterator[int]:
    """Bytes of the segments other than weights that sleep levels 1 and 2 both copy to the host."""
    if rules.runtime_offloaded:
        blocks = runner_buffers(model, settings, gpu) - sampler_tables(model, settings)
        yield from _segment_sizes((blocks, flashinfer_workspace(model, settings, gpu)))
    if rules.graphs_flag and is_given(settings.given, rules.graphs_flag):
        yield memory.graphs.bytes


def _segment_sizes(sizes: Sequence[int]) -> list[int]:
    """Bytes of the segments that torch's allocator reserves for tensors of these sizes in bytes."""
    allocator = CachingAllocator(ascending_addresses=True)
    for size in sizes:
        if size > 0:
            allocator.allocate(size)
    return allocator.used_segments
