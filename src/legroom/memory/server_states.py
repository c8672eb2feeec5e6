"""A server's memory by its state: serving, asleep at level 1 or 2, and while its weights are replaced.

Sleep mode loads the weights and the KV cache into a pool whose pages can be given back to the driver while their
addresses stay. Whatever lies outside that pool stays on the card: the CUDA context, modules and library handles,
communication buffers, CUDA graphs and, before 0.24, the tables of the model runner. Level 1 copies the weights to
page-locked host memory, a segment of torch's pool at a time, each rounded up to a power of two; level 2 drops them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from legroom.errors import LegroomError
from legroom.facts.sleep_mode import first_release_with_sleep, host_bandwidth_bytes_s, sleep_rules
from legroom.figures import Figure, Term, exact
from legroom.memory.activation.layer_peaks import expert_scratch
from legroom.memory.activation.profile_run import cublas_workspace, element_bytes, sampling
from legroom.memory.attention_workspace import flashinfer_workspace
from legroom.memory.caching_allocator import CachingAllocator
from legroom.memory.dtypes import INT32_BYTES
from legroom.memory.host_needs import pinned_bytes
from legroom.memory.overhead import (
    charges_device_wide,
    communication_bytes,
    counts_runner_buffers,
    held_at_start,
    non_torch,
    wire_before_snapshot,
)
from legroom.memory.runner_buffers import runner_buffers, sampler_tables
from legroom.memory.weights.loaded import buffer_bytes, weight_segments
from legroom.records import dataclass
from legroom.vllm.args import is_given

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.facts.sleep_mode import SleepRules
    from legroom.memory.deployment_memory import DeploymentMemory
    from legroom.memory.layout import Layout
    from legroom.vllm.args import EngineSettings

StateName = Literal["serving", "asleep_1", "asleep_2", "updating_weights"]
SleepLevel = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server takes in one state: of each card, and of the host beside what its processes hold anyway."""

    name: StateName
    device: Figure
    """Of the fullest card, with the working: what stays there and why."""
    host: Figure
    """Of all ranks on one host."""
    wake_s: float | None = None
    """From here to serving; None where nothing has to be brought back, or where it must be read from files."""


def server_states(
    model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory, host_bytes_s: float | None = None
) -> tuple[ServerState, ...]:
    """Every state of a server that is started with sleep mode; LegroomError where its release has none."""
    rules = sleep_rules(settings.release)
    if rules is None:
        raise LegroomError(
            f"vLLM {settings.release} has no sleep mode", f"it came with {first_release_with_sleep()}: name a later one"
        )
    rank = max(memory.ranks, key=lambda layout: layout.weights.bytes)
    stays = residue(model, gpu, settings, memory.graphs, rank.rank)
    loaded = weight_segments(model, settings, gpu, rank.rank)
    tables = _segments(_sampler_sizes(rules, model, settings))
    kept = [*_offloaded(rules, model, gpu, settings, memory)]
    saved = buffer_bytes(model, settings, gpu, rank.rank) if rules.buffers_saved else 0
    ranks = settings.gpus_used
    pinned = _host(
        Term("weights", _pinned(loaded) * ranks, "page-locked, a segment at a time, rounded up to a power of two"),
        Term("tables of the sampler", _pinned(tables) * ranks, "in the same pool"),
        Term("buffers of the runner", _pinned(kept) * ranks, "page-locked, too"),
    )
    dropped = _host(
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


def _host(*terms: Term) -> Figure:
    return Figure(sum(term.bytes for term in terms), terms=tuple(term for term in terms if term.bytes))


def _pinned(segments: Sequence[int]) -> int:
    return sum(pinned_bytes(size) for size in segments)


def serving(rank: Layout) -> Figure:
    """What a server holds of a card at its peak; the pool is as large as it was when it started, so its band is that
    of everything else."""
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
    """What a sleeping server keeps of a card; `graphs`: what was captured."""
    rules = sleep_rules(settings.release)
    charged = non_torch(model, settings, gpu, stage)
    context = held_at_start(settings, gpu)
    tables = sampler_tables(model, settings) if counts_runner_buffers(settings) else 0
    # Device-wide accounting has the context in the charged part already.
    outside = 0 if charges_device_wide(settings) else context.bytes
    terms = [
        Term("CUDA context", outside, "a process that lives has one"),
        Term("modules and handles", charged.bytes - tables, "kernels, libraries, communication"),
        Term("tables of the model runner", _tables(rules, model, gpu, settings), "allocated outside the pool"),
        Term("workspaces", _workspaces(rules, model, gpu, settings), "cuBLAS, the sampler, experts"),
    ]
    if not (rules and rules.graphs_flag and is_given(settings.given, rules.graphs_flag)):
        terms.append(Term("CUDA graphs", graphs.bytes, "they stay, and are valid when it wakes"))
    if rules and rules.communication_flag and is_given(settings.given, rules.communication_flag):
        suspended = communication_bytes(settings, gpu) + wire_before_snapshot(settings, gpu)
        terms.append(Term("suspended communication", -suspended, rules.communication_flag))
    size = sum(term.bytes for term in terms)
    # The tables are known to the byte: they have no part in the doubt about what is charged.
    doubt = (charged.high - charged.bytes) * (charged.bytes - tables) // max(charged.bytes, 1)
    spread = doubt + (context.high - context.bytes) + (graphs.high - graphs.bytes)
    return Figure(size, "estimated", max(0, size - spread), size + spread, tuple(term for term in terms if term.bytes))


def _tables(rules: SleepRules | None, model: Model, gpu: Gpu, settings: EngineSettings) -> int:
    """What the model runner keeps outside every pool that sleep empties."""
    stays = runner_buffers(model, settings, gpu)
    if rules and rules.runtime_offloaded:
        stays = sampler_tables(model, settings)
    return stays - sum(_sampler_sizes(rules, model, settings))


def _workspaces(rules: SleepRules | None, model: Model, gpu: Gpu, settings: EngineSettings) -> int:
    kept = cublas_workspace(gpu) + sampling(model, settings, gpu).kept_bytes
    if rules and rules.runtime_offloaded:
        return kept
    kept += flashinfer_workspace(model, settings, gpu)
    return kept + expert_scratch(model, settings, gpu).kept_elements * element_bytes(settings)


def _sampler_sizes(rules: SleepRules | None, model: Model, settings: EngineSettings) -> tuple[int, ...]:
    """The tables of the sampler that lie in the pool of the weights: a count for every token, and the rest."""
    every = sampler_tables(model, settings)
    if not (rules and rules.sampler_pooled and settings.runner == "V2" and every):
        return ()
    counts = settings.max_num_seqs * model.vocab_size * INT32_BYTES
    return (counts, every - counts)


def _offloaded(
    rules: SleepRules, model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory
) -> Iterator[int]:
    """The segments beside the weights that go to the host at both levels."""
    if rules.runtime_offloaded:
        blocks = runner_buffers(model, settings, gpu) - sampler_tables(model, settings)
        yield from _segments((blocks, flashinfer_workspace(model, settings, gpu)))
    if rules.graphs_flag and is_given(settings.given, rules.graphs_flag):
        yield memory.graphs.bytes


def _segments(sizes: Sequence[int]) -> list[int]:
    """The segments that torch takes for tensors of these sizes."""
    allocator = CachingAllocator(ascending_addresses=True)
    for size in sizes:
        if size > 0:
            allocator.allocate(size)
    return allocator.used_segments
