"""CUDA graphs: the estimate that the release subtracts from the budget, and the memory of capturing them.

A captured graph needs driver memory per kernel node, so layers x capture sizes, and a private torch pool for the
activations and split-KV buffers of the largest capture. All-reduces of tensor parallelism are nodes too: two per layer
and graph, by FlashInfer's fused kernel, vLLM's custom kernel over peer access, or NCCL, whose nodes are far larger.
The constants are fitted (`facts/data/fit.json`).

The V2 runner of 0.29+ samples free memory between the warm-up pass of a full graph and its capture. The capture first
releases the blocks torch cached in that pass, so the sample is negative and raises the estimate (`warm_up_cache`)."""

from collections.abc import Iterable, Sequence
from typing import Any

from legroom.facts.fit import by_release, constants
from legroom.facts.gpus import HOPPER, Gpu
from legroom.facts.model import Attention, Dense, Experts, FeedForward, LatentAttention, Mixer, Model, latent
from legroom.figures import Figure, Term, estimated, exact
from legroom.memory.activation.layer_peaks import expert_scratch, layer_kinds
from legroom.memory.activation.profile_run import forward_bytes, is_compiled
from legroom.memory.attention_workspace import flashinfer_workspace, largest_split_buffers, split_buffers
from legroom.memory.caching_allocator import SMALL_SEGMENT_BYTES, Block, CachingAllocator
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import ALL_PARTS, cached, cached_by_model
from legroom.units import MIB, cdiv
from legroom.vllm.args import EngineSettings, draft_name, is_given

_CUSTOM_RANKS = (2, 4, 6, 8)  # World sizes of vLLM's custom all-reduce kernel.


def is_nvlink_server(gpu: Gpu) -> bool:
    """Whether the card is a Hopper or data-centre Blackwell GPU (compute capability 9 or 10), however it is wired."""
    return gpu.vendor == "nvidia" and gpu.compute_capability[0] in (9, 10)


def fuses_all_reduce(settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether FlashInfer fuses the all-reduce with the norm (0.17+; at first not with data or pipeline parallelism)."""
    rows = constants()["graphs"]["all_reduce"]["fused_beside"]
    if settings.engine == "V0" or settings.release.before(rows[0]["since"]):
        return False
    beside = by_release(rows, settings.release)
    is_alone = settings.data_parallel_size == 1 or beside["data_parallel"]
    is_alone = bool(is_alone and (settings.pipeline_parallel_size == 1 or beside["pipeline_parallel"]))
    return is_alone and settings.tensor_parallel_size > 1 and is_nvlink_server(gpu) and is_compiled(settings)


def captured_all_reduce(model: Model, settings: EngineSettings, gpu: Gpu, sizes: Iterable[int]) -> int:
    """Bytes of the all-reduce nodes in graphs of these batch sizes (tokens); 0 without tensor parallelism or NVIDIA."""
    if settings.tensor_parallel_size == 1 or gpu.vendor != "nvidia":
        return 0
    fit = constants()["graphs"]["all_reduce"]
    fused_mib, nccl_mib = fit["fused_mib"], fit["nccl_mib"]
    custom_mib = by_release(fit["custom"][settings.engine], settings.release)["mib"]
    largest_fused = 0.0
    if fuses_all_reduce(settings, gpu):
        by_ranks = fit["fused_largest_mib"][f"{gpu.compute_capability[0]}.x"]
        largest_fused = by_ranks.get(str(settings.tensor_parallel_size), 0) * MIB
    custom_below = 8 * MIB if _has_custom_all_reduce(settings, gpu) else 0  # CustomAllreduce's max_size
    summed_bytes = (size * model.hidden_size * dtype_bytes(settings.dtype) for size in sizes)
    layer_mib = sum(
        fused_mib if summed <= largest_fused else custom_mib if summed < custom_below else nccl_mib
        for summed in summed_bytes
    )
    return int(len(model.layers) * layer_mib * MIB)


def _has_custom_all_reduce(settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether vLLM's custom kernel runs: 2, 4, 6 or 8 ranks on NVLink (or unknown), two on PCIe with peer access."""
    ranks = settings.tensor_parallel_size
    if ranks not in _CUSTOM_RANKS or is_given(settings.given, "--disable-custom-all-reduce"):
        return False
    if gpu.interconnect in ("nvlink", ""):
        return True
    without_peers = constants()["graphs"]["all_reduce"]["without_peer_access"]
    return ranks == 2 and gpu.interconnect == "pcie" and not any(line in gpu.name for line in without_peers)


_SAMPLES = 2  # The number of sizes in the release's trial capture.


@cached(ALL_PARTS)
def graph_estimate(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """vLLM's own estimate of CUDA graph memory, which it subtracts from the budget; 0 in releases without one."""
    if not settings.graph_estimate_applied or settings.cudagraph_mode == "NONE":
        return exact(0, "CUDA graph estimate", "this release subtracts nothing for graphs here")
    if settings.runner != "V2":
        terms = _sampled_terms(model, settings, gpu)
    elif settings.release.before("0.29.0"):
        return exact(0, "CUDA graph estimate", "the V2 runner estimates 0 before 0.29")
    else:
        terms = _trial_terms(model, settings, gpu)
    guess = sum(term.bytes for term in terms)
    spread = int(guess * constants()["graphs"]["estimate"]["relative_band"])
    return estimated(guess, guess - spread, guess + spread + _draft_logits(model, settings), terms)


def _draft_logits(model: Model, settings: EngineSettings) -> int:
    """The most bytes of a draft's own graphs: logits of all drafted tokens in its dtype and float32; 0 without one."""
    if not draft_name(settings.given.speculative_config) and not model.draft_layers:
        return 0
    rows = min(settings.max_num_seqs, max(settings.cudagraph_capture_sizes, default=0))
    each = dtype_bytes(settings.dtype) + FLOAT32_BYTES
    return settings.num_speculative_tokens * rows * cdiv(model.vocab_size, settings.tensor_parallel_size) * each


def _sampled_terms(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[Term, ...]:
    """The V1 runner's estimate (0.18+): two sizes each of piecewise and full graphs, further ones like the second."""
    fit = constants()["graphs"]["estimate"]
    piecewise, full = captured_sizes(settings)
    nodes = cached_by_model(layer_nodes, model)
    splits = split_buffers(model, settings, gpu, max(full, default=0))
    rest = (len(piecewise) - 1) * max(1.0, nodes * fit["piecewise_mib"]) if piecewise else 0.0
    rest += (len(full) - 1) * max(1.0, nodes * fit["full_mib"]) if full else 0.0
    activations = fit["pool_per_activation_byte"] * captured_activations(model, settings, gpu)
    first = fit["first_mib"] * MIB + max(fit["pool_per_split_byte"] * splits, activations)
    # The sizes that the sampled estimate counts: the second largest of each kind, once for all but the first.
    counted_sizes = [kind[-_SAMPLES] for kind in (piecewise, full) if len(kind) >= _SAMPLES for _ in kind[1:]]
    return (
        Term("first captures", int(first), f"the largest of {len(piecewise)} piecewise and {len(full)} full sizes"),
        Term("the other sizes", int(rest * MIB), "each counts like the second of its kind"),
        *_all_reduce_terms(model, settings, gpu, counted_sizes),
        *_counted_as_graphs(model, settings, gpu),
    )


def _trial_terms(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[Term, ...]:
    """The V2 runner's estimate (0.29+): a trial captures every piecewise graph and the two largest full ones."""
    # The second full capture counts for each of the others, at least 1 MiB. It is measured from before torch releases
    # the blocks of the warm-up pass, so it is negative, and the released bytes are added to the estimate.
    piecewise, full = captured_sizes(settings)
    sampled = full[-_SAMPLES:]
    splits = largest_split_buffers(model, settings, gpu, sampled)
    terms = (
        _driver_term("trial graphs", model, settings, gpu, piecewise, sampled),
        Term("trial pool", _pool_bytes(model, settings, gpu, splits), "activations and attention splits"),
        *_all_reduce_terms(model, settings, gpu, [*piecewise, *sampled]),
        *_counted_as_graphs(model, settings, gpu),
    )
    if len(full) < _SAMPLES:
        return terms
    returned = warm_up_cache(model, settings, gpu, sampled[0])
    return (
        *terms,
        Term("the other full graphs", (len(full) - 1) * MIB, "1 MiB each"),
        Term("returned by torch", returned, f"cached by the warm-up of {sampled[0]} tokens, and counted as if kept"),
    )


@cached(ALL_PARTS)
def graph_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """The GPU memory that all captured CUDA graphs take; 0 where none are captured."""
    if settings.cudagraph_mode == "NONE" or settings.enforce_eager:
        return exact(0, "CUDA graphs", "none are captured")
    piecewise, full = captured_sizes(settings)
    pool = _pool_bytes(model, settings, gpu, largest_split_buffers(model, settings, gpu, full))
    terms = (
        _driver_term("graph nodes", model, settings, gpu, piecewise, full),
        Term("graph pool", pool, "activations and attention splits of the largest captures"),
        *_all_reduce_terms(model, settings, gpu, [*piecewise, *full]),
        *_host_terms(gpu),
    )
    taken = sum(term.bytes for term in terms)
    spread = int(taken * _graph_constants(settings)["relative_band"])
    return estimated(taken, taken - spread, taken + spread, terms)


def _driver_term(
    label: str, model: Model, settings: EngineSettings, gpu: Gpu, piecewise: Sequence[int], full: Sequence[int]
) -> Term:
    """The driver's memory, as a term named `label`, for piecewise and full graphs of these batch sizes (fitted)."""
    fit = _graph_constants(settings)
    on_hopper = gpu.vendor == "nvidia" and gpu.compute_capability == HOPPER
    full_mib = fit.get("hopper_full_mib", fit["full_mib"]) if on_hopper else fit["full_mib"]
    nodes = cached_by_model(layer_nodes, model)
    size = int(nodes * (len(piecewise) * fit["piecewise_mib"] + len(full) * full_mib) * MIB)
    return Term(label, size, f"{len(model.layers)} layers x ({len(piecewise)} piecewise + {len(full)} full sizes)")


def _all_reduce_terms(model: Model, settings: EngineSettings, gpu: Gpu, sizes: list[int]) -> tuple[Term, ...]:
    """The buffers of all-reduces between ranks in graphs of these batch sizes (tokens); empty if they take nothing."""
    size = captured_all_reduce(model, settings, gpu, sizes)
    ranks = settings.tensor_parallel_size
    return (Term("all-reduces", size, f"captured between {ranks} ranks, two a layer and graph"),) if size else ()


def _pool_bytes(model: Model, settings: EngineSettings, gpu: Gpu, split_buffers_bytes: int) -> int:
    """Bytes of the graphs' memory pool (fitted), whose split-KV buffers take `split_buffers_bytes`."""
    fit = _graph_constants(settings)
    pool = fit["pool_mib"] * MIB + fit["pool_per_split_byte"] * split_buffers_bytes
    pool += fit["pool_per_activation_byte"] * captured_activations(model, settings, gpu)
    blocks = [layer.feedforward for layer, _ in cached_by_model(layer_kinds, model)]
    if any(isinstance(block, Experts) and block.shared_intermediate_size for block in blocks):
        # Shared experts run on a stream of their own, for which cuBLAS keeps a second workspace.
        pool += fit.get("second_stream_mib", 0) * MIB
    if any(isinstance(block, Experts) for block in blocks):
        # pool_mib_experts is for a largest capture size of 512.
        pool += fit["pool_mib_experts"] * MIB * max(settings.cudagraph_capture_sizes, default=0) / 512
    return int(pool)


def captured_activations(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes of the forward pass's temporary tensors at the largest captured batch size."""
    largest = max(settings.cudagraph_capture_sizes, default=0)
    return forward_bytes(model, settings, gpu) * largest // settings.max_num_batched_tokens


def _counted_as_graphs(model: Model, settings: EngineSettings, gpu: Gpu) -> tuple[Term, ...]:
    """FlashInfer's workspace and unified host memory, which a trial capture counts as graphs; empty without both."""
    workspace = flashinfer_workspace(model, settings, gpu)
    term = Term("FlashInfer's workspace", workspace, "asked for by the first capture")
    return (*((term,) if workspace else ()), *_host_terms(gpu))


def _host_terms(gpu: Gpu) -> tuple[Term, ...]:
    """Host memory of the graphs, which counts only where CPU and GPU share memory; empty for other cards."""
    size = int(constants()["graphs"]["unified_mib"] * MIB)
    term = Term("host memory", size, "CPU and GPU share one memory, and free memory is the system's")
    return (term,) if gpu.unified else ()


def _graph_constants(settings: EngineSettings) -> dict[str, Any]:
    """The fitted constants of CUDA graph memory for this release and model runner."""
    runner = "V0" if settings.engine == "V0" else settings.runner
    return by_release(constants()["graphs"][runner], settings.release)


def captured_sizes(settings: EngineSettings) -> tuple[list[int], list[int]]:
    """The batch sizes, ascending, captured as (piecewise, full) graphs; in FULL_* modes full ones hold decodes only."""
    sizes, mode = sorted(settings.cudagraph_capture_sizes), settings.cudagraph_mode
    decode_tokens = settings.max_num_seqs * (1 + settings.num_speculative_tokens)
    full = [size for size in sizes if mode == "FULL" or size <= decode_tokens] if mode.startswith("FULL") else []
    return sizes if mode.endswith("PIECEWISE") else [], full


def layer_nodes(model: Model) -> float:
    """The model's layers by their graph nodes, one plain layer as 1: MLA layers count more, those with two mixers 2."""
    heavier: float = constants()["graphs"]["heavy_layer"] - 1.0
    mixers = sum(1 + len(layer.also) for layer in model.layers)
    return mixers + heavier * len(latent(layer.mixer for layer in model.layers))


def warm_up_cache(model: Model, settings: EngineSettings, gpu: Gpu, sequences: int) -> int:
    """Bytes of the allocator segments that a forward pass of `sequences` decode tokens leaves cached in torch."""
    batch = sequences * dtype_bytes(settings.dtype)
    split = split_buffers(model, settings, gpu, sequences)
    expert_elements = expert_scratch(model, settings, gpu).passing_elements // settings.max_num_batched_tokens
    return cached_by_model(_cached_segment_bytes, model, settings.tensor_parallel_size, batch, split, expert_elements)


def _cached_segment_bytes(model: Model, ranks: int, element_bytes: int, split_bytes: int, expert_elements: int) -> int:
    """Bytes of the allocator segments after a simulated forward pass. `element_bytes`: one element of each token;
    `split_bytes`: split-KV buffers; `expert_elements`: elements per token of all experts' buffers together."""
    allocator = CachingAllocator(ascending_addresses=True)
    hidden = model.hidden_size * element_bytes
    residual, normed = allocator.allocate(hidden), allocator.allocate(hidden)
    for layer in model.layers[:6]:  # later layers reuse the blocks of the first ones
        heads, out = _mixer_widths(layer.mixer, model.hidden_size, ranks)
        projected = allocator.allocate(heads * element_bytes)
        allocator.free(normed)
        output = allocator.allocate(out * element_bytes)
        if split_bytes and isinstance(layer.mixer, Attention | LatentAttention):
            mixer = layer.mixer
            sums = split_bytes // ((mixer.kv_lora_rank if isinstance(mixer, LatentAttention) else mixer.v_head_dim) + 1)
            for block in [allocator.allocate(split_bytes - sums), allocator.allocate(sums)]:
                allocator.free(block)
            # Experts work in buffers that are kept, so nothing else is carved out of these blocks.
            split_bytes = 0 if any(isinstance(each.feedforward, Experts) for each in model.layers) else split_bytes
        allocator.free(projected)
        after = allocator.allocate(hidden)
        allocator.free(output)
        residual, normed = _add_and_normalize(allocator, after, residual, hidden)
        wide, narrow = _feedforward_widths(layer.feedforward, expert_elements, ranks)
        gate_up = allocator.allocate(wide * element_bytes)
        allocator.free(normed)
        activated = allocator.allocate(narrow * element_bytes)
        allocator.free(gate_up)
        down = allocator.allocate(hidden)
        allocator.free(activated)
        residual, normed = _add_and_normalize(allocator, down, residual, hidden)
    return sum(allocator.large_segments) + SMALL_SEGMENT_BYTES


def _add_and_normalize(allocator: CachingAllocator, added: Block, residual: Block, size: int) -> tuple[Block, Block]:
    """(the sum of two blocks, its norm), each newly allocated with `size` bytes; both given blocks are freed."""
    summed, normed = allocator.allocate(size), allocator.allocate(size)
    allocator.free(added)
    allocator.free(residual)
    return summed, normed


def _mixer_widths(mixer: Mixer | None, hidden: int, ranks: int) -> tuple[int, int]:
    """Elements per token and rank of (a mixer's input projections, its output); 3 and 1 x `hidden` if not attention."""
    if isinstance(mixer, Attention):
        heads = cdiv(mixer.heads, ranks)
        return heads * mixer.head_dim + cdiv(mixer.kv_heads, ranks) * mixer.score_width, heads * mixer.v_head_dim
    if isinstance(mixer, LatentAttention):
        heads = cdiv(mixer.heads, ranks)
        return heads * mixer.latent_width, heads * mixer.kv_lora_rank
    return 3 * cdiv(hidden, ranks), cdiv(hidden, ranks)


def _feedforward_widths(block: FeedForward | None, expert_elements: int, ranks: int) -> tuple[int, int]:
    """Elements per token and rank of (a block's first product, its activation). A block that is not dense has half of
    `expert_elements` (of the buffers for all experts of one token) in each."""
    if isinstance(block, Dense):
        inner = cdiv(block.intermediate_size, ranks)
        return (2 * inner if block.gated else inner), inner
    return expert_elements // 2, expert_elements - expert_elements // 2
