"""The live tensors of one decoder layer in the profile run, in elements of the model's dtype per token.

Layers run one after another, so the peak of the forward pass is that of one layer, not a sum over layers.

The live sets come from torch's allocation history of vLLM 0.26 on an H200 (see `bench/fit.py`). With torch.compile the
graph is split at every mixer, and the inputs and outputs of a mixer live until the next split; in eager mode Python's
local variables keep a few hidden states that the compiled graph frees."""

from dataclasses import replace

from legroom.facts.anatomy import Anatomy, anatomy
from legroom.facts.fit import constants
from legroom.facts.gpus import HOPPER, Gpu
from legroom.facts.model import Attention, Dense, Experts, LatentAttention, Layer, Mixer, Model, StateSpace, recurrent
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import cached_by_model
from legroom.records import dataclass
from legroom.units import cdiv, round_up
from legroom.vllm.args import EngineSettings

TUNING = "kernel tuning"


@dataclass(frozen=True, slots=True)
class LayerPeak:
    """Live elements per token at one point of a layer, and their terms in words."""

    where: str
    elements: int
    how: str
    after_experts: bool = False
    """Experts ran before, so their workspace is allocated."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How the model runs: compiled or eager, and the precision of activations."""

    ranks: int
    compiled: bool
    quantized_activations: bool = False
    """8-bit activations with one scale per token or tensor."""
    blockwise_activations: bool = False
    """8-bit activations with a scale per 128 values."""
    fused_product: bool = False
    """In eager mode too, the feed-forward product is written in 8 bits by a fused kernel."""
    on_transformers: bool = False
    """The Transformers library's code runs the layers."""
    fused_gated_norm: bool = False
    """In eager mode, one kernel norms and rotates queries and keys, and copies an attention's output gate."""


@dataclass(frozen=True, slots=True)
class Widths:
    """What a layer's LayerPeak is computed from: hidden size, model family, anatomy and how the model runs."""

    hidden: int
    model_type: str
    hidden_act: str
    anatomy: Anatomy
    execution: Execution
    held: int = 0
    """Live elements of the previous mixer."""


def layer_kinds(model: Model, start: int = 0, stop: int | None = None) -> tuple[tuple[Layer, bool], ...]:
    """The distinct layers of `layers[start:stop]`, each with whether a layer before it in that range has experts."""
    kinds: dict[tuple[Layer, bool], None] = {}
    after_experts = False
    for layer in model.layers[start:stop]:
        kinds[layer, after_experts] = None
        after_experts = after_experts or isinstance(layer.feedforward, Experts)
    return tuple(kinds)


def layer_peaks(model: Model, start: int, stop: int, execution: Execution) -> tuple[LayerPeak, ...]:
    """Live tensors at the widest point of each distinct mixer and feed-forward block of `layers[start:stop]`."""
    kinds, hidden, model_type = layer_kinds(model, start, stop), model.hidden_size, model.model_type
    mixers = [layer.mixer for layer, _ in kinds]
    shape, hidden_act = anatomy(model_type, model.architecture, model.config), str(model.config.get("hidden_act"))
    widths, ranks = Widths(hidden, model_type, hidden_act, shape, execution), execution.ranks
    kept = max((held_by_mixer(mixer, model_type, ranks) for mixer in mixers), default=0)
    carried = max((carried_to_mixer(mixer, model_type, ranks) for mixer in mixers), default=0)
    result = [
        replace(_tuning(first, layer, hidden, ranks), after_experts=after)
        for layer, after in kinds
        for first in recurrent([layer.mixer])
        if first.kind == "mamba2"
    ][:1]
    for layer, after in kinds:
        own = held_by_mixer(layer.mixer, model_type, ranks) if layer.mixer else kept
        part, at = layer.feedforward, replace(widths, held=own)
        block = _experts(part, at) if isinstance(part, Experts) else _dense(part, at) if part else None
        if block:
            result.append(replace(block, after_experts=after or block.where == "experts"))
        mixer_at = mixer_peak(layer.mixer, replace(widths, held=carried))
        if mixer_at:
            result.append(replace(mixer_at, after_experts=after))
    if execution.on_transformers and not execution.compiled and widths.anatomy.rope != "none":
        # The Transformers library computes the cosines and sines of each batch.
        each = {mixer.rope_kind: mixer.rope_width for mixer in mixers if mixer is not None}
        tables = 2 * sum(each.values()) * (2 if model_type in constants()["eager"]["float32_rotations"] else 1)
        result = [replace(peak, elements=peak.elements + tables) for peak in result]
    return tuple(result)


def held_by_mixer(mixer: Mixer | None, model_type: str, ranks: int) -> int:
    """Elements per token and rank of a mixer's tensors that stay alive while the next graph piece (the MLP) runs."""
    if mixer is None:
        return 0
    if not isinstance(mixer, StateSpace):
        return cdiv(mixer.heads, ranks) * mixer.v_head_dim
    projected, inner = state_space_widths(mixer, ranks)
    if mixer.kind == "gdn":
        # Qwen3-Next reorders its projection into copies, so the projection itself is freed.
        return 2 * inner if model_type.startswith("qwen3_next") else projected + 2 * inner
    return projected + inner


def carried_to_mixer(mixer: Mixer | None, model_type: str, ranks: int) -> int:
    """Elements per token and rank of a mixer's tensors that are still alive when the next layer's mixer starts."""
    kept = held_by_mixer(mixer, model_type, ranks)
    for gated in recurrent([mixer]):
        if gated.kind == "gdn" and not model_type.startswith("qwen3_next"):
            return kept - state_space_widths(gated, ranks)[1]
    return kept


def state_space_widths(mixer: StateSpace, ranks: int) -> tuple[int, int]:
    """(elements per token of a recurrent mixer's input projection, of its inner width) on one of `ranks` ranks."""
    width = dict(mixer.config)
    if mixer.kind == "mamba2":
        inner = cdiv(width["intermediate_size"], ranks)
        groups = cdiv(width["n_groups"], ranks)
        return 2 * inner + 2 * groups * width["state_size"] + cdiv(width["num_heads"], ranks), inner
    if mixer.kind == "gdn":
        value = cdiv(width["num_v_heads"], ranks) * width["head_v_dim"]
        return 2 * cdiv(width["num_k_heads"], ranks) * width["head_k_dim"] + 2 * value, value
    if mixer.kind in ("kda", "lightning"):
        inner = cdiv(width["num_heads"], ranks) * width["head_dim"]
        return 4 * inner, inner
    inner = cdiv(width["intermediate_size"], ranks)
    return (3 if mixer.kind == "short_conv" else 2) * inner, inner


def mixer_peak(mixer: Mixer | None, at: Widths) -> LayerPeak | None:
    """The live tensors (projections, output, residual) where a mixer needs most; None for a layer without a mixer."""
    if isinstance(mixer, Attention):
        return _attention(mixer, at)
    if isinstance(mixer, LatentAttention):
        return _latent(mixer, at)
    return _state_space(mixer, at) if mixer is not None else None


def _attention(mixer: Attention, at: Widths) -> LayerPeak:
    """Live elements per token on one rank at the peak of an attention layer."""
    heads, kv_heads = cdiv(mixer.heads, at.execution.ranks), max(1, mixer.kv_heads // at.execution.ranks)
    query, key, value = heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim
    gate = query if mixer.output_gate else 0
    projected, output = query + gate + key + value, heads * mixer.v_head_dim
    if at.execution.compiled:
        elements = at.held + 2 * at.hidden + projected + gate + query + key + output
        return LayerPeak("attention", elements, "last output + 2 x hidden + qkv + rotated q, k + output")
    if gate and mixer.qk_norm and at.execution.fused_gated_norm:
        elements = 4 * at.hidden + projected + query + key + 3 * gate + output
        return LayerPeak("attention", elements, "4 x hidden + qkv + rotated q, k + gates + output")
    fit = constants()["eager"]
    if mixer.qk_norm and at.model_type.startswith(tuple(fit["float32_norms"])):
        elements = 2 * at.hidden + projected + 6 * query + 2 * gate
        return LayerPeak("attention", elements, "2 x hidden + qkv + q normed in float32")
    normed = query + key if mixer.qk_norm or at.anatomy.qk_norm else 0
    if at.execution.on_transformers:
        return _transformers_attention(at, query, key, projected, normed)
    if normed and at.model_type.startswith(tuple(fit["normed_values"])):
        normed += value
    if at.anatomy.attention_gate:
        # The gate, its activation and the product; an activation in float32 takes four elements beside the gate.
        wide = 5 if at.model_type in fit["float32_gates"] else 3
        gates = (wide if at.anatomy.attention_gate == "width" else 1) * output
        elements = 2 * at.hidden + projected + normed + output + gates
        return LayerPeak("attention", elements, "2 x hidden + qkv + normed q, k + output + gates")
    quantized = output // 2 + output // 64 if at.execution.blockwise_activations else 0
    elements = 3 * at.hidden + projected + normed + 2 * gate + output + quantized
    return LayerPeak("attention", elements, "3 x hidden + qkv + normed q, k + output")


def _transformers_attention(at: Widths, query: int, key: int, projected: int, normed: int) -> LayerPeak:
    """Live elements per token while Transformers rotates queries, then keys, out of place; `query`, `key`, `projected`
    (qkv) and `normed`: elements per token of these tensors."""
    fit = constants()["eager"]
    if at.model_type in fit["norms_after_rotation"]:
        # These norms write q and k in an order that attention has to copy.
        elements = 3 * at.hidden + projected + normed + query + key + query
        return LayerPeak("attention", elements, "3 x hidden + qkv + normed and copied q, k + output")
    steps = (2 if at.model_type in fit["float32_rotations"] else 1) * max(3 * query, query + 3 * key)
    hidden = (2 if at.model_type in fit["post_norms"] else 3) * at.hidden
    return LayerPeak("attention", hidden + projected + normed + steps, "hidden states + qkv + normed and rotated q, k")


def _latent(mixer: LatentAttention, at: Widths) -> LayerPeak:
    """Live elements per token on one rank at the peak of an MLA layer."""
    heads = cdiv(mixer.heads, at.execution.ranks)
    query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    output, query_latent = heads * mixer.v_head_dim, mixer.q_lora_rank or 0
    latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim + query_latent
    elements = at.hidden + query + output + latent
    if not at.execution.compiled:
        elements += at.hidden + mixer.kv_lora_rank + query_latent
    return LayerPeak("latent attention", elements, "hidden + q + latents + output")


def _state_space(mixer: StateSpace, at: Widths) -> LayerPeak:
    """Live elements per token on one rank at the peak of a Mamba or linear-attention layer."""
    projected, inner = state_space_widths(mixer, at.execution.ranks)
    name = {"gdn": "gated delta net"}.get(mixer.kind, "state space")
    if mixer.kind == "gdn":
        copies = projected - inner if at.model_type.startswith("qwen3_next") else 0
        if at.execution.compiled:
            elements = at.held + 2 * at.hidden + projected + copies + 2 * inner
            return LayerPeak(name, elements, "last mixer's tensors + 2 x hidden + projections + output")
        return LayerPeak(name, 7 * at.hidden + projected + copies + 4 * inner, "7 x hidden + projections + output")
    if at.execution.compiled:
        elements = at.held + 3 * at.hidden + projected + inner
        return LayerPeak(name, elements, "last mixer's tensors + 3 x hidden + projections")
    if mixer.kind == "mamba2" and at.model_type in constants()["eager"]["float32_gates"]:
        return LayerPeak(name, 4 * at.hidden + projected + 5 * inner, "4 x hidden + projection + gate in float32")
    if mixer.kind == "mamba2" and dict(mixer.config).get("n_groups", 1) > 1:
        # The gated norm over several groups runs in plain torch, in float32.
        return LayerPeak(name, 2 * at.hidden + projected + 5 * inner, "2 x hidden + projection + norm in float32")
    # The profile run of Mamba-1 returns after its convolution.
    copies = 1 if mixer.kind == "mamba1" else 2
    return LayerPeak(name, 4 * at.hidden + projected + copies * inner, "4 x hidden + projection + output")


def _tuning(mixer: StateSpace, layer: Layer, hidden: int, ranks: int) -> LayerPeak:
    """Live elements per token while Triton tunes the first Mamba-2 layer (of `hidden` inputs) on a first start."""
    elements = (2 + 2 * len(layer.also)) * hidden + sum(state_space_widths(mixer, ranks))
    return LayerPeak(TUNING, elements, "hidden states + projection + output")


def _dense(block: Dense, at: Widths) -> LayerPeak:
    """Live elements per token on one rank at the peak of a dense feed-forward block."""
    inner = cdiv(block.intermediate_size, at.execution.ranks)
    if not at.execution.compiled:
        fit = constants()["eager"]
        library = "transformers" if at.execution.on_transformers else "vllm"
        hidden = fit["hidden_states"].get(at.model_type, fit["hidden_states_default"][library]) * at.hidden
        plain = fit["plain_activations"][library]
        times = plain.get(at.model_type, plain.get(at.hidden_act, 3 if block.gated else 2))
        # The product is quantized before the gate is freed, save in LlamaMLP: a byte a value, a scale per block of 128.
        kept = at.execution.quantized_activations and at.model_type not in fit["fused_static_fp8"]["families"]
        quantized = inner // 2 + inner // 64 if at.execution.blockwise_activations else inner // 2 * kept
        fused = inner - inner // 2 if at.execution.fused_product and block.gated else 0
        elements = int(times * inner) - fused + hidden + quantized
        return LayerPeak("feed-forward", elements, f"{times} x intermediate + hidden states")
    # Compiled, the product is written in 8 bits: half an element per value.
    product = inner // 2 if at.execution.quantized_activations and block.gated else inner
    elements = (2 * inner if block.gated else inner) + product + 2 * at.hidden + at.held
    what = "gate, up and their product" if block.gated else "two intermediates"
    return LayerPeak("feed-forward", elements, f"{what} + 2 x hidden + mixer's tensors")


def _experts(block: Experts, at: Widths) -> LayerPeak:
    """Live elements per token at the peak of an MoE block, without the fused-experts buffers (`ExpertScratch`)."""
    shared = 3 * cdiv(block.shared_intermediate_size, at.execution.ranks)
    if beside := block.parallel_dense:
        shared = max(shared, (3 if beside.gated else 2) * cdiv(beside.intermediate_size, at.execution.ranks))
    # Either the shared experts are at their widest, or their output lives beside that of the routed ones.
    waiting = 7 * at.hidden + at.held if at.execution.compiled else 6 * at.hidden
    kept = at.held if at.execution.compiled else 0
    elements = max(kept + 4 * at.hidden + shared, waiting if shared else 0) + 2 * block.num_experts
    return LayerPeak("experts", elements, "mixer's tensors + hidden states + router + shared experts")


_DEEP_GEMM_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Elements of the fused-experts buffers for all tokens of the profile run."""

    kept_elements: int = 0
    """Persistent workspace: live in all later layers and while sampling."""
    passing_elements: int = 0
    """Live inside the experts only."""
    quantized_elements: int = 0
    """Inputs of both products in 8 bits, live inside the experts only (Triton kernel)."""


def expert_scratch(model: Model, settings: EngineSettings, gpu: Gpu) -> ExpertScratch:
    """The largest fused-experts buffers of any layer (sparse attention shares them from 0.13 on); 0 without experts."""
    kinds = cached_by_model(layer_kinds, model)
    blocks = {layer.feedforward for layer, _ in kinds if isinstance(layer.feedforward, Experts)}
    if not blocks:
        return ExpertScratch()
    scratches = [_scratch_of_block(block, model, settings, gpu) for block in blocks]
    largest = max(scratches, key=lambda scratch: scratch.kept_elements + scratch.passing_elements)
    if settings.release.before("0.13.0"):
        return largest
    # Attention and experts take turns with one workspace.
    sparse = max(_sparse_workspace(layer.mixer, settings, gpu) for layer, _ in kinds)
    return replace(largest, kept_elements=max(largest.kept_elements, sparse // dtype_bytes(settings.dtype)))


_PREFILL_CHUNK_SIZE = 4  # Requests whose latents DeepSeek-V4 gathers at once (DeepseekV4Attention.PREFILL_CHUNK_SIZE).
_INDEXED_REQUESTS = 40  # Requests of max_model_len whose keys a sparse indexer gathers (get_max_prefill_buffer_size).


def _sparse_workspace(mixer: Mixer | None, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes of a DeepSeek sparse attention layer's workspace: indexer keys, in V4 also FlashMLA's latents; else 0."""
    if not isinstance(mixer, LatentAttention):
        return 0
    ratio = mixer.compress_ratio or 1
    keys = _INDEXED_REQUESTS * settings.max_model_len // ratio * (mixer.index_head_dim + FLOAT32_BYTES)
    if not mixer.compress_ratio or gpu.compute_capability[0] == 12:
        return keys if mixer.index_head_dim else 0
    compressed = cdiv(settings.max_model_len, ratio) if ratio > 1 else 0
    rows = compressed + (mixer.window or 0) + settings.max_num_batched_tokens
    return max(keys if mixer.index_head_dim else 0, _PREFILL_CHUNK_SIZE * rows * mixer.latent_width * 2)


def _uses_deep_gemm(model: Model, settings: EngineSettings, gpu: Gpu, inner: int, width: int) -> bool:
    """Whether DeepGEMM (0.20+) runs an expert's `inner` x `width` matrices in block-wise FP8 (Hopper, Blackwell)."""
    scheme = model.quantization
    if scheme is None or scheme.block is None or (scheme.experts_bits or scheme.weight_bits) != 8:
        return False
    if gpu.compute_capability[0] not in (9, 10):
        return False
    switches = {settings.given.env.get(name) for name in ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")}
    aligned = inner % _DEEP_GEMM_ROWS == 0 and width % _DEEP_GEMM_ROWS == 0
    return "0" not in switches and aligned and settings.release.at_least("0.20.0")


def _quantizes_inputs(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether 8-bit copies of the expert GEMMs' inputs are written; cards before Ada multiply in 16 bits."""
    scheme = model.quantization
    if scheme is None:
        return settings.quantization == "fp8" and gpu.compute_capability >= (8, 9)
    activations = scheme.dynamic_activations or scheme.static_activations
    return bool(activations) and (scheme.experts_bits or scheme.weight_bits) == 8 and gpu.compute_capability >= (8, 9)


def _takes_humming(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether the Humming kernel (0.32+, preferred to Marlin on Hopper) runs experts with packed integer weights."""
    scheme, preferred = model.quantization, settings.release.at_least("0.32.0")
    packed = scheme is not None and scheme.number == "int" and scheme.method in ("awq", "gptq", "compressed-tensors")
    return packed and preferred and gpu.compute_capability == HOPPER and not settings.enable_expert_parallel


def _scratch_of_block(block: Experts, model: Model, settings: EngineSettings, gpu: Gpu) -> ExpertScratch:
    """The fused-experts buffers of one MoE block on one rank, by release and kernel."""
    release = settings.release
    inner = cdiv(block.intermediate_size, 1 if settings.enable_expert_parallel else settings.expert_ranks)
    width = block.latent_size or block.hidden_size
    gate_up = 2 * inner if block.gated else inner
    # The tokens of all data-parallel ranks are gathered before the experts, and their outputs scattered after.
    tokens, top_k = settings.max_num_batched_tokens * settings.data_parallel_size, block.experts_per_token
    gathered = 2 * tokens * width if settings.data_parallel_size > 1 else 0
    if settings.quantization == "mxfp4" and gpu.compute_capability[0] == HOPPER[0]:
        # Triton kernels: a gathered product and a scattered output, freed after each layer.
        return ExpertScratch(passing_elements=tokens * top_k * (inner + width) + gathered)
    if release.at_least("0.13.0"):
        # One persistent workspace of two buffers, each wide enough for both products.
        chunk = tokens if release.at_least("0.18.0") else min(tokens, 16 * 1024)
        rows = chunk * top_k
        first, quantized = max(inner, width), 0
        if _uses_deep_gemm(model, settings, gpu, inner, width):
            if release.at_least("0.32.0"):
                first = cdiv(first, 2)  # only ever holds FP8, and is sized by bytes now
            local = cdiv(block.num_experts, settings.expert_ranks if settings.enable_expert_parallel else 1)
            rows = round_up(rows + min(rows, local) * (_DEEP_GEMM_ROWS - 1), _DEEP_GEMM_ROWS)
        elif _quantizes_inputs(model, settings, gpu):
            quantized = (rows * inner + chunk * width) // dtype_bytes(settings.dtype)
        elif _takes_humming(model, settings, gpu):
            first = max(inner, cdiv(width, top_k))  # the first product reads the tokens where they are
        return ExpertScratch(rows * (first + max(gate_up, width)), gathered, quantized)
    chunk = min(tokens, 16 * 1024 if release.at_least("0.12.0") else 32 * 1024)
    if release.before("0.8.0"):
        return ExpertScratch(passing_elements=chunk * top_k * (gate_up + inner + width))
    return ExpertScratch(passing_elements=chunk * top_k * (max(gate_up, width) + inner) + gathered)
