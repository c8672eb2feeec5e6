"""CUDA graphs: what the release subtracts for them, and what capturing them takes.

A captured graph costs the driver a piece for every kernel it holds, so layers x sizes (all-reduces of several ranks
among them: `all_reduce`), and torch a private pool as large as the largest captures need: the activations of that many
tokens and the buffers of FlashAttention 3's splits.
The constants are fitted (`facts/data/fit.json`).

The V2 runner of 0.29+ samples the free memory between the warm-up pass before a full graph and its capture. The capture
first gives back the blocks that torch cached in that pass, so the sample is below zero and the estimate of all graphs
grows by it (`warm_up_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from legroom.facts.fit import by_release, constants
from legroom.facts.gpus import HOPPER
from legroom.facts.model import Attention, Dense, Experts, LatentAttention, latent
from legroom.facts.releases import release as known_release
from legroom.figures import Figure, Term, estimated, exact
from legroom.memory.activation.layer_peaks import expert_scratch, layer_kinds
from legroom.memory.activation.profile_run import element_bytes, forward_bytes, is_compiled
from legroom.memory.attention_workspace import flashinfer_workspace, largest_split_buffers, split_buffers
from legroom.memory.caching_allocator import SMALL_SEGMENT_BYTES, CachingAllocator
from legroom.memory.figure_cache import cached, cached_by_model
from legroom.units import MIB, cdiv
from legroom.vllm.args import is_given

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import FeedForward, Mixer, Model
    from legroom.memory.caching_allocator import Block
    from legroom.vllm.args import EngineSettings


_CUSTOM_RANKS = (2, 4, 6, 8)
"""World sizes that vLLM's own kernel is compiled for."""
_CUSTOM_BELOW_BYTES = 8 * MIB


def is_nvlink_server(gpu: Gpu) -> bool:
    """Hopper and Blackwell servers; Blackwell's workstation and desktop cards (12.x) are like the cards before them."""
    return gpu.vendor == "nvidia" and gpu.compute_capability[0] in (9, 10)


def is_fused(settings: EngineSettings, gpu: Gpu) -> bool:
    """0.17+ fuses it with the norm on capability 9.0 and the 10.x family; at first not beside other parallel ranks."""
    rows = constants()["graphs"]["all_reduce"]["fused_beside"]
    if settings.engine == "V0" or known_release(settings.release).before(rows[0]["since"]):
        return False
    beside = by_release(rows, settings.release)
    if settings.data_parallel_size > 1 and not beside["data_parallel"]:
        return False
    if settings.pipeline_parallel_size > 1 and not beside["pipeline_parallel"]:
        return False
    return settings.tensor_parallel_size > 1 and is_nvlink_server(gpu) and is_compiled(settings)


def captured_all_reduce(model: Model, settings: EngineSettings, gpu: Gpu, sizes: Iterable[int]) -> int:
    """Bytes that graphs of these many tokens hold for their all-reduces."""
    if settings.tensor_parallel_size == 1 or gpu.vendor != "nvidia":
        return 0
    fit = constants()["graphs"]["all_reduce"]
    fused_mib, nccl_mib = fit["fused_mib"], fit["nccl_mib"]
    custom_mib = by_release(fit["custom"][settings.engine], settings.release)["mib"]
    largest_fused = _largest_fused_bytes(settings, gpu) if is_fused(settings, gpu) else 0
    custom_below = _CUSTOM_BELOW_BYTES if _has_own_kernel(settings, gpu) else 0
    token = model.hidden_size * element_bytes(settings)
    layer_mib = 0.0
    for size in sizes:
        summed_bytes = size * token
        if summed_bytes <= largest_fused:
            layer_mib += fused_mib
        else:
            layer_mib += custom_mib if summed_bytes < custom_below else nccl_mib
    return int(len(model.layers) * layer_mib * MIB)


def _largest_fused_bytes(settings: EngineSettings, gpu: Gpu) -> int:
    by_ranks = constants()["graphs"]["all_reduce"]["fused_largest_mib"][f"{gpu.compute_capability[0]}.x"]
    return int(by_ranks.get(str(settings.tensor_parallel_size), 0) * MIB)


def _has_own_kernel(settings: EngineSettings, gpu: Gpu) -> bool:
    """Over NVLink, or between two cards on PCIe that may read each other's memory."""
    ranks = settings.tensor_parallel_size
    if ranks not in _CUSTOM_RANKS or is_given(settings.given, "--disable-custom-all-reduce"):
        return False
    if gpu.interconnect in ("nvlink", ""):
        return True
    without_peers = constants()["graphs"]["all_reduce"]["without_peer_access"]
    return ranks == 2 and gpu.interconnect == "pcie" and not any(line in gpu.name for line in without_peers)


_SAMPLES = 2
"""Sizes that the trial capture of the release captures."""
_USUAL_LARGEST = 512
"""The largest captured size that `pool_mib_experts` is for."""


def graph_estimate(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """What the release subtracts from the budget for CUDA graphs."""
    return cached(_estimate, model, settings, gpu, 0)


def graph_bytes(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """What the graphs hold of the card once all are captured."""
    return cached(_taken, model, settings, gpu, 0)


def _estimate(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> Figure:
    if not settings.graph_estimate_applied or settings.cudagraph_mode == "NONE":
        return exact(0, "CUDA graph estimate", "this release subtracts nothing for graphs here")
    if settings.runner != "V2":
        terms = _sampled_terms(model, settings, gpu)
    elif known_release(settings.release).before("0.29.0"):
        return exact(0, "CUDA graph estimate", "the V2 runner estimates 0 before 0.29")
    else:
        terms = _trial_terms(model, settings, gpu)
    guess = sum(term.bytes for term in terms)
    spread = int(guess * constants()["graphs"]["estimate"]["relative_band"])
    return estimated(guess, guess - spread, guess + spread, terms)


def _sampled_terms(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[Term, ...]:
    """0.18+, V1 runner: the two largest sizes of each kind are captured, the second counts for the rest, 1 MiB at
    least."""
    fit = constants()["graphs"]["estimate"]
    pieces, full = captures(settings)
    each = layer_nodes(model)
    splits = split_buffers(model, settings, gpu, max(_full_sizes(settings), default=0))
    rest = (pieces - 1) * max(1.0, each * fit["piecewise_mib"]) if pieces else 0.0
    rest += (full - 1) * max(1.0, each * fit["full_mib"]) if full else 0.0
    activations = fit["pool_per_activation_byte"] * captured_activations(model, settings, gpu)
    first = fit["first_mib"] * MIB + max(fit["pool_per_split_byte"] * splits, activations)
    return (
        Term("first captures", int(first), f"the largest of {pieces} piecewise and {full} full sizes"),
        Term("the other sizes", int(rest * MIB), "each counts like the second of its kind"),
        *_all_reduce_terms(model, settings, gpu, _counted_sizes(settings)),
        *_beside_terms(model, settings, gpu),
    )


def _trial_terms(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[Term, ...]:
    """0.29+, V2 runner: every piecewise graph and the two largest full ones are captured, then thrown away.

    What the second full capture takes counts for each of the others, 1 MiB at least. It is measured from before torch
    returns the blocks of the warm-up pass, so it is less than nothing, and what was returned is added to the estimate.
    """
    pieces, full = captures(settings)
    sampled = _full_sizes(settings)[-_SAMPLES:]
    driver = _driver_bytes(model, settings, gpu, pieces, len(sampled))
    splits = largest_split_buffers(model, settings, gpu, sampled)
    terms = (
        Term("trial graphs", driver, f"{len(model.layers)} layers x ({pieces} piecewise + {len(sampled)} full sizes)"),
        Term("trial pool", _pool_bytes(model, settings, gpu, splits), "activations and attention splits"),
        *_all_reduce_terms(model, settings, gpu, [*_piecewise_sizes(settings), *sampled]),
        *_beside_terms(model, settings, gpu),
    )
    if full < _SAMPLES:
        return terms
    returned = warm_up_cache(model, settings, gpu, sampled[0])
    return (
        *terms,
        Term("the other full graphs", (full - 1) * MIB, "1 MiB each"),
        Term("returned by torch", returned, f"cached by the warm-up of {sampled[0]} tokens, and counted as if kept"),
    )


def _taken(model: Model, settings: EngineSettings, gpu: Gpu, _: int) -> Figure:
    if settings.cudagraph_mode == "NONE" or settings.enforce_eager:
        return exact(0, "CUDA graphs", "none are captured")
    pieces, full = captures(settings)
    splits = largest_splits(model, settings, gpu)
    driver = _driver_bytes(model, settings, gpu, pieces, full)
    pool = _pool_bytes(model, settings, gpu, splits)
    terms = (
        Term("graph nodes", driver, f"{len(model.layers)} layers x ({pieces} piecewise + {full} full sizes)"),
        Term("graph pool", pool, "activations and attention splits of the largest captures"),
        *_all_reduce_terms(model, settings, gpu, [*_piecewise_sizes(settings), *_full_sizes(settings)]),
        *_host_terms(gpu),
    )
    taken = sum(term.bytes for term in terms)
    spread = int(taken * _era(settings)["relative_band"])
    return estimated(taken, taken - spread, taken + spread, terms)


def _driver_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pieces: int, full: int) -> int:
    fit = _era(settings)
    on_hopper = gpu.vendor == "nvidia" and gpu.compute_capability == HOPPER
    full_mib = fit.get("hopper_full_mib", fit["full_mib"]) if on_hopper else fit["full_mib"]
    return int(layer_nodes(model) * (pieces * fit["piecewise_mib"] + full * full_mib) * MIB)


def _all_reduce_terms(model: Model, settings: EngineSettings, gpu: Gpu, sizes: list[int]) -> tuple[Term, ...]:
    size = captured_all_reduce(model, settings, gpu, sizes)
    ranks = settings.tensor_parallel_size
    return (Term("all-reduces", size, f"captured between {ranks} ranks, two a layer and graph"),) if size else ()


def _counted_sizes(settings: EngineSettings) -> list[int]:
    """What the sampled estimate takes all sizes of a kind but the first for: as many as its second."""
    kinds = (_piecewise_sizes(settings), _full_sizes(settings))
    return [kind[-_SAMPLES] for kind in kinds if len(kind) >= _SAMPLES for _ in kind[1:]]


def _pool_bytes(model: Model, settings: EngineSettings, gpu: Gpu, splits: int) -> int:
    fit = _era(settings)
    pool = fit["pool_mib"] * MIB + fit["pool_per_split_byte"] * splits
    pool += fit["pool_per_activation_byte"] * captured_activations(model, settings, gpu)
    if any(isinstance(layer.feedforward, Experts) for layer, _ in cached_by_model(layer_kinds, model)):
        pool += fit["pool_mib_experts"] * MIB * max(settings.cudagraph_capture_sizes, default=0) / _USUAL_LARGEST
    return int(pool)


def captured_activations(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """What the greediest moment of the largest captured batch allocates."""
    largest = max(settings.cudagraph_capture_sizes, default=0)
    return forward_bytes(model, settings, gpu) * largest // settings.max_num_batched_tokens


def largest_splits(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """The largest split buffers of all full graphs."""
    return largest_split_buffers(model, settings, gpu, _full_sizes(settings))


def _beside_terms(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[Term, ...]:
    """What the trial capture counts with the graphs, though it is not theirs."""
    workspace = flashinfer_workspace(model, settings, gpu)
    term = Term("FlashInfer's workspace", workspace, "asked for by the first capture")
    return (*((term,) if workspace else ()), *_host_terms(gpu))


def _host_terms(gpu: Gpu) -> tuple[Term, ...]:
    if not gpu.unified:
        return ()
    size = int(constants()["graphs"]["unified_mib"] * MIB)
    return (Term("host memory", size, "CPU and GPU share one memory, and free memory is the system's"),)


def _era(settings: EngineSettings) -> dict[str, Any]:
    runner = "V0" if settings.engine == "V0" else settings.runner
    return by_release(constants()["graphs"][runner], settings.release)


def captures(settings: EngineSettings) -> tuple[int, int]:
    """How many piecewise and full graphs are captured: full ones are of decode batches, one token a sequence."""
    return len(_piecewise_sizes(settings)), len(_full_sizes(settings))


def _piecewise_sizes(settings: EngineSettings) -> list[int]:
    return sorted(settings.cudagraph_capture_sizes) if settings.cudagraph_mode.endswith("PIECEWISE") else []


def _full_sizes(settings: EngineSettings) -> list[int]:
    sizes = sorted(settings.cudagraph_capture_sizes)
    if settings.cudagraph_mode == "FULL":
        return sizes
    if not settings.cudagraph_mode.startswith("FULL"):
        return []
    return [size for size in sizes if size <= settings.max_num_seqs * (1 + settings.num_speculative_tokens)]


def layer_nodes(model: Model) -> float:
    """Layers of this model, counted in those of a plain transformer: MLA launches more kernels."""
    heavier: float = constants()["graphs"]["heavy_layer"] - 1.0
    return len(model.layers) + heavier * cached_by_model(_latent_layers, model)


def _latent_layers(model: Model) -> int:
    return len(latent(layer.mixer for layer in model.layers))


_LAYERS = 6
"""The blocks of the first layers are there for all later ones."""


def warm_up_cache(model: Model, settings: EngineSettings, gpu: Gpu, sequences: int) -> int:
    """Bytes of the segments that a pass of `sequences` decode tokens leaves behind."""
    token = sequences * element_bytes(settings)
    split = split_buffers(model, settings, gpu, sequences)
    passing = expert_scratch(model, settings, gpu).passing_elements // settings.max_num_batched_tokens
    return cached_by_model(_segments, model, settings.tensor_parallel_size, token, split, passing)


def _segments(model: Model, ranks: int, token: int, split: int, passing: int) -> int:
    """`token`: bytes of one value of each sequence; `split`, `passing`: what attention and experts ask for."""
    allocator = CachingAllocator(ascending_addresses=True)
    hidden = model.hidden_size * token
    residual, normed = allocator.allocate(hidden), allocator.allocate(hidden)
    for layer in model.layers[:_LAYERS]:
        heads, out = _mixer_widths(layer.mixer, model.hidden_size, ranks)
        projected = allocator.allocate(heads * token)
        allocator.free(normed)
        output = allocator.allocate(out * token)
        if split and isinstance(layer.mixer, Attention | LatentAttention):
            sums = split // (_output_width(layer.mixer) + 1)
            _use(allocator, split - sums, sums)
        allocator.free(projected)
        after = allocator.allocate(hidden)
        allocator.free(output)
        residual, normed = _add_and_normalize(allocator, after, residual, hidden)
        wide, narrow = _feedforward_widths(layer.feedforward, passing, ranks)
        gate_up = allocator.allocate(wide * token)
        allocator.free(normed)
        activated = allocator.allocate(narrow * token)
        allocator.free(gate_up)
        down = allocator.allocate(hidden)
        allocator.free(activated)
        residual, normed = _add_and_normalize(allocator, down, residual, hidden)
    return sum(allocator.large_segments) + SMALL_SEGMENT_BYTES


def _add_and_normalize(allocator: CachingAllocator, added: Block, residual: Block, hidden: int) -> tuple[Block, Block]:
    summed, normed = allocator.allocate(hidden), allocator.allocate(hidden)
    allocator.free(added)
    allocator.free(residual)
    return summed, normed


def _use(allocator: CachingAllocator, *sizes: int) -> None:
    for block in [allocator.allocate(size) for size in sizes]:
        allocator.free(block)


def _output_width(mixer: Attention | LatentAttention) -> int:
    return mixer.kv_lora_rank if isinstance(mixer, LatentAttention) else mixer.v_head_dim


def _mixer_widths(mixer: Mixer | None, hidden: int, ranks: int) -> tuple[int, int]:
    """Elements a token of what goes into the mixer and of what it returns."""
    if isinstance(mixer, Attention):
        heads = cdiv(mixer.heads, ranks)
        return heads * mixer.head_dim + cdiv(mixer.kv_heads, ranks) * mixer.score_width, heads * mixer.v_head_dim
    if isinstance(mixer, LatentAttention):
        heads = cdiv(mixer.heads, ranks)
        return heads * mixer.latent_width, heads * mixer.kv_lora_rank
    return 3 * cdiv(hidden, ranks), cdiv(hidden, ranks)


def _feedforward_widths(block: FeedForward | None, passing: int, ranks: int) -> tuple[int, int]:
    """Elements a token of the first product and of what the activation leaves of it."""
    if isinstance(block, Dense):
        inner = cdiv(block.intermediate_size, ranks)
        return (2 * inner if block.gated else inner), inner
    return passing // 2, passing - passing // 2
