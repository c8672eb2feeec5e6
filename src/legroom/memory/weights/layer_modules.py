"""The modules of a layer on one rank: shapes after tensor and expert parallelism. Shapes mirror vLLM's model classes.
Queries, keys and values are one matrix, and so are gate and up; a rank keeps at least one KV head; norms, routers and
the down-projections of latent attention are replicated."""

from collections.abc import Iterator
from dataclasses import replace

from legroom.errors import LegroomError
from legroom.facts import model as facts
from legroom.facts.anatomy import Anatomy
from legroom.memory.weights.module import Module, Ranks, projection, share
from legroom.units import cdiv
from legroom.vllm.args import EngineSettings
from legroom.vllm.traits import built_encoders, replicates_encoders


def norm(part: str, name: str, size: int, anatomy: Anatomy) -> list[Module]:
    """One norm, `name`, of `size` values, counted to `part`; empty in families whose norms have no weights."""
    return [] if anatomy.norm == "none" else [Module(part, name, size, bias=anatomy.norm == "layer")]


def mixer_modules(mixer: facts.Mixer, hidden: int, anatomy: Anatomy, ranks: Ranks) -> list[Module]:
    """The weight matrices of one mixer on one tensor-parallel rank; LegroomError for an unknown kind."""
    if isinstance(mixer, facts.Attention):
        return _attention(mixer, hidden, anatomy, ranks)
    if isinstance(mixer, facts.LatentAttention):
        return _latent(mixer, hidden, ranks)
    if mixer.kind not in _STATE_SPACES:
        raise LegroomError(f"layers of kind {mixer.kind!r} are not known", "this architecture cannot be planned yet")
    return _STATE_SPACES[mixer.kind](mixer, hidden, ranks.tensor, anatomy)


def _attention(mixer: facts.Attention, hidden: int, anatomy: Anatomy, ranks: Ranks) -> list[Module]:
    """The weights of an attention layer on one rank; KV heads are replicated where there are fewer than ranks."""
    heads = share(mixer.heads, ranks.tensor, "the number of attention heads")
    kv_heads = max(1, mixer.kv_heads // ranks.tensor)
    queries = heads * mixer.head_dim * (2 if mixer.output_gate else 1)
    keys, values = kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim
    index = mixer.index_head_dim
    if index:
        # MiniMax-M3 appends its indexer's queries (one head per KV head) and its single key to the same matrix.
        keys += kv_heads * index + index
    if mixer.shares_kv:
        keys = values = 0
    outputs, whole_outputs = heads * mixer.v_head_dim, mixer.heads * mixer.v_head_dim
    if mixer.shares_kv:
        inward = projection("self_attn.q_proj", queries, hidden, mixer.qkv_bias)
    else:
        parts = {"shards": ("q_proj", "k_proj", "v_proj"), "slices": (queries, keys, values)}
        inward = projection("self_attn.qkv_proj", queries + keys + values, hidden, mixer.qkv_bias, **parts)
    out = [inward, projection("self_attn.o_proj", hidden, outputs, mixer.o_bias, whole_inputs=whole_outputs)]
    if anatomy.attention_gate:
        gates = heads * (mixer.v_head_dim if anatomy.attention_gate == "width" else 1)
        out.append(projection("self_attn.gate_proj", gates, hidden))
    if mixer.sinks:
        out.append(Module("attention", "self_attn.sinks", heads))
    out += _qk_norms(mixer, anatomy, heads, kv_heads)
    if index:
        out += [Module("norms", "self_attn.index_q_norm", index), Module("norms", "self_attn.index_k_norm", index)]
    return out


def _qk_norms(mixer: facts.Attention, anatomy: Anatomy, heads: int, kv_heads: int) -> list[Module]:
    """The query and key norms for these numbers of heads on a rank; empty where the model has none."""
    kind = anatomy.qk_norm or (anatomy.qk_norm_shape if mixer.qk_norm else "")
    width = mixer.head_dim
    sizes = {
        "head": (width, width),
        "width": (heads * width, kv_heads * width),
        "whole": (mixer.heads * width, mixer.kv_heads * width),
        "per_head": (heads * width, kv_heads * width),
    }.get(kind)
    if sizes is None:
        return []
    names = ("self_attn.q_norm",) if mixer.shares_kv else ("self_attn.q_norm", "self_attn.k_norm")
    return [Module("norms", name, size, bias=anatomy.qk_norm_bias) for name, size in zip(names, sizes, strict=False)]


def _latent(mixer: facts.LatentAttention, hidden: int, ranks: Ranks) -> list[Module]:
    """The weights of an MLA layer on one rank."""
    if mixer.compress_ratio or mixer.window:
        return _compressed_latent(mixer, hidden, ranks)
    heads = share(mixer.heads, ranks.tensor, "the number of attention heads")
    query_dim = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    out: list[Module] = []
    if mixer.q_lora_rank:
        fused = ("q_a_proj", "kv_a_proj_with_mqa")
        out += [
            projection("self_attn.fused_qkv_a_proj", mixer.q_lora_rank + latent, hidden, shards=fused),
            Module("norms", "self_attn.q_a_layernorm", mixer.q_lora_rank),
            projection("self_attn.q_b_proj", query_dim, mixer.q_lora_rank),
        ]
    else:
        out += [
            projection("self_attn.kv_a_proj_with_mqa", latent, hidden),
            projection("self_attn.q_proj", query_dim, hidden),
        ]
    outputs, whole_outputs = heads * mixer.v_head_dim, mixer.heads * mixer.v_head_dim
    out += [
        Module("norms", "self_attn.kv_a_layernorm", mixer.kv_lora_rank),
        projection("self_attn.kv_b_proj", heads * mixer.qk_nope_head_dim + outputs, mixer.kv_lora_rank),
        projection("self_attn.o_proj", hidden, outputs, whole_inputs=whole_outputs),
    ]
    if mixer.output_gate:
        out.append(projection("self_attn.g_proj", outputs, hidden))
    return out + _indexer(mixer, hidden)


def _indexer(mixer: facts.LatentAttention, hidden: int) -> list[Module]:
    """The indexer of DeepSeek sparse attention, replicated on every rank; empty without one."""
    if not mixer.index_head_dim:
        return []
    queries = mixer.index_heads * mixer.index_head_dim
    return [
        projection("self_attn.indexer.wq_b", queries, mixer.q_lora_rank or hidden),
        Module("attention", "self_attn.indexer.wk_weights_proj", mixer.index_head_dim + mixer.index_heads, hidden),
        Module("norms", "self_attn.indexer.k_norm", mixer.index_head_dim, bias=True, dtype="float32"),
    ]


def _compressed_latent(mixer: facts.LatentAttention, hidden: int, ranks: Ranks) -> list[Module]:
    """DeepSeek-V4: one latent head, low-rank queries and outputs, and a compressor in some layers."""
    heads = share(mixer.heads, ranks.tensor, "the number of attention heads")
    width = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    rank = mixer.q_lora_rank or hidden
    outputs = share(mixer.o_groups * mixer.o_lora_rank, ranks.tensor, "the low-rank output width")
    out = [
        Module("attention", "attn.attn_sink", max(heads, 64), dtype="float32"),  # the kernel pads to 64 heads
        projection("attn.fused_wqa_wkv", rank + width, hidden, shards=("wq_a", "wkv")),
        Module("norms", "attn.q_norm", rank),
        projection("attn.wq_b", heads * width, rank),
        Module("norms", "attn.kv_norm", width),
        projection("attn.wo_a", outputs, mixer.heads * width // mixer.o_groups),
        projection("attn.wo_b", hidden, outputs),
    ]
    if mixer.index_head_dim:
        out.append(projection("attn.indexer.wq_b", mixer.index_heads * mixer.index_head_dim, rank))
        out.append(Module("attention", "attn.indexer.weights_proj", mixer.index_heads, hidden))
        out += _compressor("attn.indexer.compressor", mixer.compress_ratio, mixer.index_head_dim, hidden)
    if mixer.compress_ratio:
        out += _compressor("attn.compressor", mixer.compress_ratio, width, hidden)
    return out


def _compressor(name: str, ratio: int, width: int, hidden: int) -> list[Module]:
    """DeepSeek-V4's compressor of `ratio` tokens into a state of `width`; at ratio 4 the windows overlap (doubled)."""
    states = 2 * width if ratio == 4 else width
    return [
        Module("attention", f"{name}.ape", ratio, states, dtype="float32"),
        Module("attention", f"{name}.fused_wkv_wgate", 2 * states, hidden),
        Module("norms", f"{name}.norm", width),
    ]


def _mamba2(mixer: facts.StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    """The weights of a Mamba-2 layer with `hidden` inputs on one of `tp` ranks."""
    inner = share(mixer.width("intermediate_size"), tp, "mamba width")
    heads = share(mixer.width("num_heads"), tp, "mamba heads")
    # Groups that do not divide over the ranks are replicated.
    conv = inner + 2 * cdiv(mixer.width("n_groups"), tp) * mixer.width("state_size")
    return [
        Module("attention", "mixer.A", heads, dtype="float32"),
        Module("attention", "mixer.D", heads),
        Module("attention", "mixer.dt_bias", heads),
        Module("attention", "mixer.conv1d", conv, mixer.width("conv_kernel"), bias=True),
        projection("mixer.in_proj", inner + conv + heads, hidden),
        projection("mixer.out_proj", hidden, inner),
        *([Module("norms", "mixer.norm", inner)] if anatomy.mamba_norm else ()),
    ]


def _mamba1(mixer: facts.StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    """The weights of a Mamba-1 layer with `hidden` inputs on one of `tp` ranks."""
    inner = share(mixer.width("intermediate_size"), tp, "mamba width")
    state, rank = mixer.width("state_size"), mixer.width("time_step_rank")
    norms = (rank, state, state) if anatomy.mamba_input_norms else ()
    return [
        Module("attention", "mixer.conv1d", inner, mixer.width("conv_kernel"), bias=True),
        projection("mixer.in_proj", 2 * inner, hidden),
        projection("mixer.x_proj", rank + 2 * state, inner),
        Module("attention", "mixer.dt_proj", inner, rank, bias=True),
        Module("attention", "mixer.A", inner, state, dtype="float32"),
        Module("attention", "mixer.D", inner),
        projection("mixer.out_proj", hidden, inner),
        *(Module("norms", f"mixer.norm{n}", size) for n, size in enumerate(norms)),
    ]


def _gdn(mixer: facts.StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    """The weights of a gated delta net with `hidden` inputs on one of `tp` ranks."""
    value_heads = share(mixer.width("num_v_heads"), tp, "linear-attention value heads")
    keys = share(mixer.width("num_k_heads") * mixer.width("head_k_dim"), tp, "linear-attention key width")
    values = value_heads * mixer.width("head_v_dim")
    return [
        Module("attention", "linear_attn.dt_bias", value_heads),
        Module("attention", "linear_attn.A_log", value_heads, dtype="float32"),
        Module("attention", "linear_attn.conv1d", 2 * keys + values, mixer.width("conv_kernel")),
        projection("linear_attn.in_proj_qkvz", 2 * (keys + values), hidden, shards=("in_proj_qkv", "in_proj_z")),
        projection("linear_attn.in_proj_ba", 2 * value_heads, hidden, shards=("in_proj_b", "in_proj_a")),
        Module("norms", "linear_attn.norm", mixer.width("head_v_dim")),
        projection("linear_attn.out_proj", hidden, values),
    ]


def _kda(mixer: facts.StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    """The weights of a Kimi delta attention layer with `hidden` inputs on one of `tp` ranks."""
    heads, dim = share(mixer.width("num_heads"), tp, "KDA heads"), mixer.width("head_dim")
    kernel, width = mixer.width("conv_kernel"), heads * dim
    gate = [
        Module("attention", "self_attn.g_a_proj", dim, hidden),
        Module("attention", "self_attn.g_b_proj", width, dim),
    ]
    if mixer.width("full_rank_gate"):
        gate = [projection("self_attn.g_proj", width, hidden)]
    return [
        projection("self_attn.qkv_proj", 3 * width, hidden, shards=("q_proj", "k_proj", "v_proj")),
        Module("attention", "self_attn.f_a_proj", dim, hidden),
        Module("attention", "self_attn.f_b_proj", width, dim),
        Module("attention", "self_attn.dt_bias", width, dtype="float32"),
        Module("attention", "self_attn.b_proj", heads, hidden),
        *(Module("attention", f"self_attn.{which}_conv1d", width, kernel, dtype="float32") for which in "qkv"),
        Module("attention", "self_attn.A_log", heads, dtype="float32"),
        *gate,
        Module("norms", "self_attn.o_norm", dim),
        projection("self_attn.o_proj", hidden, width),
    ]


def _lightning(mixer: facts.StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    """The weights of a lightning attention layer with `hidden` inputs on one of `tp` ranks."""
    heads, dim = share(mixer.width("num_heads"), tp, "linear-attention heads"), mixer.width("head_dim")
    width = heads * dim
    return [
        projection("self_attn.qkv_proj", 3 * width, hidden),
        projection("self_attn.output_gate", width, hidden),
        projection("self_attn.out_proj", hidden, width),
        Module("norms", "self_attn.norm", width),
    ]


def _short_conv(mixer: facts.StateSpace, hidden: int, tp: int, anatomy: Anatomy) -> list[Module]:
    """The weights of a short convolution layer with `hidden` inputs on one of `tp` ranks."""
    width = share(mixer.width("intermediate_size"), tp, "convolution width")
    return [
        Module("attention", "conv.conv", width, mixer.width("conv_kernel")),
        projection("conv.in_proj", 3 * width, hidden),
        projection("conv.out_proj", hidden, width),
    ]


_STATE_SPACES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _gdn,
    "kda": _kda,
    "lightning": _lightning,
    "short_conv": _short_conv,
}


def feedforward_modules(block: facts.FeedForward, anatomy: Anatomy, ranks: Ranks) -> list[Module]:
    """The weight matrices of one feed-forward block on one rank."""
    return _dense(block, ranks) if isinstance(block, facts.Dense) else _experts(block, anatomy, ranks)


def _dense(block: facts.Dense, ranks: Ranks, path: str = "mlp", part: str = "feed-forward") -> list[Module]:
    """A dense feed-forward block on one rank; `path`: where its names begin, `part`: the term they count to."""
    width = share(block.intermediate_size, ranks.tensor, "the feed-forward width")
    hidden, bias = block.hidden_size, block.bias
    if block.gated:
        parts = {"shards": ("gate_proj", "up_proj"), "slices": (width, width)}
        up = projection(f"{path}.gate_up_proj", 2 * width, hidden, bias, **parts)
    else:
        up = projection(f"{path}.up_proj", width, hidden, bias)
    down = projection(f"{path}.down_proj", hidden, width, bias, whole_inputs=block.intermediate_size)
    return [replace(up, part=part), replace(down, part=part)]


def _experts(block: facts.Experts, anatomy: Anatomy, ranks: Ranks) -> list[Module]:
    """The weights of an MoE block on one rank: router, shared and routed experts."""
    hidden, work = block.hidden_size, block.latent_size or block.hidden_size
    router_dtype = "float32" if block.router_fp32 else ""
    out = [Module("router", "mlp.gate", block.num_experts, hidden, block.router_bias, dtype=router_dtype)]
    if block.correction_bias:
        out.append(Module("router", "mlp.gate.e_score_correction_bias", block.num_experts, dtype="float32"))
    if block.hash_vocabulary:
        table = (block.hash_vocabulary, block.experts_per_token)
        out.append(Module("router", "mlp.gate.tid2eid", *table, dtype="float32"))
    if anatomy.per_expert_scale:
        out.append(Module("router", "router.scale", hidden))
        out.append(Module("router", "router.per_expert_scale", block.num_experts))
    if block.shared_intermediate_size:
        shared = facts.Dense(hidden, block.shared_intermediate_size, block.gated)
        out += _dense(shared, ranks, "mlp.shared_experts", "shared experts")
        if block.shared_gate:
            out.append(Module("router", "mlp.shared_expert_gate", 1, hidden))
    if block.latent_size:
        out.append(Module("experts", "mlp.fc1_latent_proj", work, hidden, quantizable=True))
        out.append(Module("experts", "mlp.fc2_latent_proj", hidden, work, quantizable=True))
    if block.parallel_dense:
        out += _dense(block.parallel_dense, ranks)
    return out + _routed(block, work, ranks)


def _routed(block: facts.Experts, hidden: int, ranks: Ranks) -> list[Module]:
    """One rank's routed experts: whole ones with expert parallelism (as on the first rank), else a slice of each;
    `hidden`: their input and output size."""
    spread = ranks.expert > 1
    experts = cdiv(block.num_experts + ranks.redundant_experts, ranks.expert) if spread else block.num_experts
    width = block.intermediate_size
    if not spread:
        width = share(width, ranks.expert_slices, "the expert width", "--tensor-parallel-size x --data-parallel-size")
    shards, slices = (("gate_proj", "up_proj"), (width, width)) if block.gated else (("up_proj",), ())
    wide = width * len(shards)
    up = Module("experts", "mlp.experts.w13", wide, hidden, block.bias, experts, shards, True, slices=slices)
    down = replace(up, name="mlp.experts.w2", outputs=hidden, inputs=width, shards=("down_proj",), slices=())
    return [up, replace(down, whole_inputs=block.intermediate_size)]


def encoder_modules(model: facts.Model, settings: EngineSettings, tensor_ranks: int) -> Iterator[Module]:
    """The vision and audio encoders, which every pipeline stage holds, on one of `tensor_ranks` ranks (or whole)."""
    ranks = 1 if replicates_encoders(settings.given, model) else tensor_ranks
    for encoder in built_encoders(settings.given, model, settings.release):
        modules = {id(weight): _encoder_module(weight, ranks) for weight in encoder.weights}
        yield from (modules[id(weight)] for weight in _by_block(encoder))
        for _ in range(encoder.buffer_levels):
            yield Module("buffers", "deepstack_input_embeds", settings.max_num_batched_tokens, model.hidden_size)


def _encoder_module(weight: facts.Linear, ranks: int) -> Module:
    """One encoder weight as one rank stores it: a slice of its outputs or inputs if it is split over `ranks`."""
    outputs = cdiv(weight.outputs, ranks) if weight.split == "out" else weight.outputs
    inputs = cdiv(weight.inputs, ranks) if weight.split == "in" else weight.inputs
    part = "buffers" if weight.name == "rotary_table" else "encoder"
    return Module(part, weight.name, outputs, inputs, weight.bias, dtype=weight.dtype)


def _by_block(encoder: facts.Modality) -> Iterator[facts.Linear]:
    """Every encoder weight, repeated `count` times, in the order of creation, which decides how torch packs them."""
    repeated: list[facts.Linear] = []

    def blocks() -> Iterator[facts.Linear]:
        """Yields the weights in `repeated` once for each of the encoder's layers, then empties the list."""
        for _ in range(encoder.num_layers):
            for weight in repeated:
                yield from [weight] * (weight.count // encoder.num_layers)
        repeated.clear()

    for weight in encoder.weights:
        if encoder.num_layers > 1 and weight.count % encoder.num_layers == 0:
            repeated.append(weight)
            continue
        yield from blocks()
        yield from [weight] * weight.count
    yield from blocks()
