"""The KV cache spec of every layer of a model on one pipeline stage."""

from dataclasses import replace

from legroom.facts.gpus import Gpu
from legroom.facts.model import Attention, LatentAttention, Mixer, Model, StateSpace, attending, recurrent
from legroom.facts.releases import Release
from legroom.memory.dtypes import dtype_bytes, head_token_bytes, latent_token_bytes
from legroom.memory.kv import attention_backend as backends
from legroom.memory.kv import specs as kv
from legroom.memory.stages import stage_range
from legroom.memory.weights.module import share
from legroom.records import dataclass
from legroom.vllm.args import WITHOUT_CACHE, EngineSettings, draft_method, predicts_itself

DRAFT = "draft."
"""The prefix of a draft model's layer names."""
WHOLE_REQUEST = 1 << 40
"""block_size of a state that covers a whole request: vLLM uses max_model_len, which no request exceeds."""


@dataclass(frozen=True, slots=True)
class _Deployment:
    """The values that all specs of one deployment share."""

    model: Model
    settings: EngineSettings
    release: Release
    block_size: int
    in_flight_tokens: int
    state_mode: str
    state_padding: int | None
    kv_cache_dtype: str


def kv_specs(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> dict[str, kv.CacheSpec]:
    """The spec of every layer of one stage by layer name, in the model's order; draft layers come last."""
    deployment = _deployment(model, settings, gpu)
    specs: dict[str, kv.CacheSpec] = {}
    boundary = _boundary_layers(model, settings)
    unpacked = replace(deployment, kv_cache_dtype="auto")
    for index in stage_range(len(model.layers), settings, pp_rank):
        layer = model.layers[index]
        for position, mixer in enumerate((layer.mixer, *layer.also)):
            if mixer is not None:
                own = unpacked if index in boundary else deployment
                specs.update(_layer_specs(mixer, f"{index}.{position}", own))
    if pp_rank == settings.pipeline_parallel_size - 1:
        for index, mixer in enumerate(draft_mixers(model, settings)):
            specs.update(_layer_specs(mixer, f"{DRAFT}{index}", deployment))
    return specs


def _boundary_layers(model: Model, settings: EngineSettings) -> frozenset[int]:
    """Indices of the first and last two layers, if a packed KV cache leaves them in the model's dtype; else empty."""
    if not backends.keeps_boundary_layers(model, settings):
        return frozenset()
    last = len(model.layers)
    number = min(2, last // 2)
    return frozenset((*range(number), *range(last - number, last)))


def block_size(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """The block size of the attention layers after all alignments."""
    return _deployment(model, settings, gpu).block_size


def draft_mixers(model: Model, settings: EngineSettings) -> tuple[Mixer, ...]:
    """The mixers with a cache that speculative decoding adds; empty where it adds none."""
    config = settings.given.speculative_config
    method = draft_method(config)
    if not config or not settings.num_speculative_tokens or method in WITHOUT_CACHE:
        return ()
    if predicts_itself(method):
        return tuple(layer.mixer for layer in model.draft_layers if layer.mixer is not None)
    if model.draft is not None:
        mixed = (mixer for layer in model.draft.layers for mixer in (layer.mixer, *layer.also))
        return tuple(mixer for mixer in mixed if mixer is not None)
    attention = attending(layer.mixer for layer in model.layers)
    full = [mixer for mixer in attention if mixer.window is None]
    # An EAGLE head is one full-attention layer of the target's width.
    return ((full or attention)[-1],) if attention and method.startswith("eagle") else ()


def _deployment(model: Model, settings: EngineSettings, gpu: Gpu) -> _Deployment:
    """What the cache specs of all layers share: block size, KV dtype, state mode and padding, tokens in one step."""
    batches = settings.max_concurrent_batches if settings.release.at_least("0.26.0") else 1
    size = backends.block_size_before_alignment(model, settings, gpu)
    mode = backends.state_cache_mode(model, settings)
    padding = None
    states = recurrent(layer.mixer for layer in model.distinct_layers)
    mixers = (mixer for layer in model.distinct_layers for mixer in (layer.mixer, *layer.also))
    token_bytes = next(filter(None, (_token_bytes(mixer, settings) for mixer in mixers)), 0)
    if states and token_bytes:
        largest = max(_state_bytes(mixer, model, settings) for mixer in states)
        size = backends.aligned_block_size(model, settings, gpu, size, token_bytes=token_bytes, state_bytes=largest)
        padding = size * token_bytes if settings.release.at_least("0.10.0") else None
    # V1's Falcon layers ignore --kv-cache-dtype and keep the model's own precision.
    ignored = model.architecture == "FalconForCausalLM" and settings.engine == "V1"
    dtype = "auto" if ignored else settings.kv_cache_dtype
    in_flight = batches * settings.max_num_batched_tokens
    return _Deployment(model, settings, settings.release, size, in_flight, mode, padding, dtype)


def _token_bytes(mixer: Mixer | None, settings: EngineSettings) -> int:
    """KV cache bytes of one token in one layer on one rank; 0 for layers without a KV cache of their own."""
    if isinstance(mixer, LatentAttention):
        return latent_token_bytes(mixer.latent_width, settings.kv_cache_dtype, settings.dtype)
    if not isinstance(mixer, Attention) or mixer.shares_kv or not mixer.causal:
        return 0
    width = head_token_bytes(mixer.head_dim, mixer.head_dim, settings.kv_cache_dtype, settings.dtype)
    return _kv_heads(mixer, settings) * width


def _kv_heads(mixer: Attention, settings: EngineSettings) -> int:
    """KV heads of one rank; with more ranks than heads they are replicated."""
    return max(1, mixer.kv_heads // settings.tensor_parallel_size)


def _layer_specs(mixer: Mixer, name: str, deployment: _Deployment) -> dict[str, kv.CacheSpec]:
    """The cache specs of a mixer by cache name, with its indexer's if it has one; empty where it stores no KV."""
    if isinstance(mixer, StateSpace):
        settings, release = deployment.settings, deployment.release
        size = _state_bytes(mixer, deployment.model, settings)
        padded = deployment.state_padding if deployment.state_padding and deployment.state_padding != size else None
        whole = settings.given.mamba_block_size or WHOLE_REQUEST
        block = whole if deployment.state_mode == "none" else deployment.block_size
        blocks, per_length = _state_blocks(mixer, deployment.state_mode, settings.num_speculative_tokens, release)
        return {name: kv.StateSpec(block, size, blocks, per_length, padded, mixer.kind)}
    if isinstance(mixer, LatentAttention):
        return _latent_specs(mixer, name, deployment)
    if mixer.shares_kv or (not mixer.causal and not mixer.cross):
        return {}
    specs: dict[str, kv.CacheSpec] = {name: _attention_spec(mixer, deployment)}
    if mixer.index_head_dim:
        width = mixer.index_head_dim * 2  # MiniMax-M3: a bfloat16 index key per token, on every rank
        specs[f"{name}.index"] = kv.LatentSpec(deployment.block_size, 1, mixer.index_head_dim, 0, width, role="indexer")
    return specs


def _attention_spec(mixer: Attention, deployment: _Deployment) -> kv.CacheSpec:
    """The cache spec of an attention layer on one rank: full, sliding-window, chunked, or cross-attention."""
    settings = deployment.settings
    heads = _kv_heads(mixer, settings)
    v_head_dim = mixer.v_head_dim if deployment.release.at_least("0.14.0") else mixer.head_dim
    # The backends for unequal key and value widths (MiMo-V2) and for block-sparse layers (MiniMax-M3) pack no scales.
    token_bytes = heads * head_token_bytes(
        mixer.head_dim,
        v_head_dim,
        deployment.kv_cache_dtype,
        settings.dtype,
        packs_scales=mixer.head_dim == v_head_dim and not mixer.index_head_dim,
    )
    page = (deployment.block_size, heads, mixer.head_dim, v_head_dim, token_bytes)
    if mixer.cross:
        # 0.11+ reserves for the whole encoder budget of a step, 0.10.2 for the longest input.
        budget = settings.max_num_batched_tokens
        if deployment.release.before("0.11.0"):
            budget = int(deployment.model.config.get("max_source_positions") or budget)
        return kv.CrossAttentionSpec(*page, encoder_tokens=budget)
    in_flight = {"in_flight_tokens": deployment.in_flight_tokens}
    if mixer.window is not None:
        return kv.SlidingWindowSpec(
            *page, window=mixer.window, retained_tokens=_retained_tokens(deployment), **in_flight
        )
    if mixer.chunk is not None and deployment.release.at_least("0.10.0"):
        return kv.ChunkedLocalSpec(*page, chunk=mixer.chunk, **in_flight)
    return kv.FullAttentionSpec(*page, context_shards=context_shards(settings))


def context_shards(settings: EngineSettings) -> int:
    """How many ranks split the KV cache of a sequence: DCP from 0.10.2 on, times PCP from 0.12.0 to 0.25.1."""
    shards = settings.decode_context_parallel_size if settings.release.at_least("0.10.2") else 1
    if settings.release.at_least("0.12.0") and settings.release.before("0.26.0"):
        shards *= settings.prefill_context_parallel_size
    return shards


def _retained_tokens(deployment: _Deployment) -> int:
    """Tokens kept before a sliding window because multi-module MTP may prefill them again (0.28+); else 0."""
    if deployment.release.before("0.28.0") or len(deployment.model.draft_layers) < 2:
        return 0
    method = draft_method(deployment.settings.given.speculative_config)
    return max(0, deployment.settings.num_speculative_tokens - 1) if predicts_itself(method) else 0


def _latent_specs(mixer: LatentAttention, name: str, deployment: _Deployment) -> dict[str, kv.CacheSpec]:
    """The cache specs of an MLA layer by name: its own and, if any, its indexer's; with a window DeepSeek-V4's."""
    if mixer.window is not None:
        return _compressed_specs(name, mixer, deployment)
    settings = deployment.settings
    if deployment.release.before("0.7.1") or settings.given.env.get("VLLM_MLA_DISABLE", "0") == "1":
        return {name: _unfolded_spec(mixer, deployment)}  # keys and values are cached, not the latent
    width = mixer.latent_width
    dtype = settings.kv_cache_dtype
    if mixer.index_head_dim and dtype.startswith("fp8"):
        dtype = "fp8_ds_mla"
    token_bytes = latent_token_bytes(width, dtype, settings.dtype)
    if settings.engine == "V0" and deployment.release.within("0.7.2", "0.7.3"):
        token_bytes = -(-token_bytes // 256) * 256  # entries were padded to 256 bytes then
    size, shards = deployment.block_size, context_shards(settings)
    leads = bool(mixer.index_head_dim) and deployment.release.at_least("0.31.0")
    specs: dict[str, kv.CacheSpec] = {
        name: kv.LatentSpec(size, 1, width, 0, token_bytes, context_shards=shards, leads=leads)
    }
    if mixer.index_head_dim:
        index = _index_key_bytes(mixer)
        specs[f"{name}.index"] = kv.LatentSpec(size, 1, index, 0, index, context_shards=shards, role="indexer")
    return specs


def _index_key_bytes(mixer: LatentAttention) -> int:
    """Bytes of the indexer's FP8 key of one token, with a float32 scale per 128 values."""
    return mixer.index_head_dim + mixer.index_head_dim // 128 * 4


def _unfolded_spec(mixer: LatentAttention, deployment: _Deployment) -> kv.FullAttentionSpec:
    """The cache spec of MLA cached as full heads, not as latents; up to 0.7.0 heads of 192 are padded to 256."""
    head_dim = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    if deployment.release.before("0.7.1"):
        head_dim = max(head_dim, 256)
    heads = max(1, mixer.heads // deployment.settings.tensor_parallel_size)
    settings = deployment.settings
    token_bytes = heads * head_token_bytes(head_dim, head_dim, settings.kv_cache_dtype, settings.dtype)
    return kv.FullAttentionSpec(deployment.block_size, heads, head_dim, head_dim, token_bytes)


def _compressed_specs(name: str, mixer: LatentAttention, deployment: _Deployment) -> dict[str, kv.CacheSpec]:
    """DeepSeek-V4's cache specs by name: a window of latents; if the layer compresses, its compressor's state and the
    compressed latents; if it has an indexer too, that compressor's state and the index: one, three or five."""
    packed = deployment.settings.kv_cache_dtype in ("auto", "fp8", "fp8_ds_mla", "fp8_e4m3")
    alignment = 576 if packed else 512
    settings, width = deployment.settings, mixer.latent_width
    token_bytes = 584 if packed else latent_token_bytes(width, settings.kv_cache_dtype, settings.dtype)

    def windowed(block: int, head_dim: int, row_bytes: int, span: int) -> kv.LatentWindowSpec:
        """A cache of the last `span` tokens, `row_bytes` each, in blocks of `block` tokens."""
        page = (block, 1, head_dim, 0, row_bytes, kv.align_page(row_bytes, block, alignment))
        kept = {"in_flight_tokens": deployment.in_flight_tokens, "retained_tokens": _retained_tokens(deployment)}
        return kv.LatentWindowSpec(*page, window=span, **kept)

    def compressed(head_dim: int, row_bytes: int, role: str) -> kv.LatentSpec:
        """A cache of one row of `row_bytes` per `compress_ratio` tokens; `role`: its name in the arithmetic's text."""
        padded = kv.align_page(row_bytes, deployment.block_size // mixer.compress_ratio, alignment)
        return kv.LatentSpec(deployment.block_size, 1, head_dim, 0, row_bytes, padded, mixer.compress_ratio, role=role)

    specs: dict[str, kv.CacheSpec] = {f"{name}.window": windowed(64, width, token_bytes, mixer.window or 0)}
    if mixer.compress_ratio > 1:
        overlap = 2 if mixer.compress_ratio == 4 else 1
        block = 4 if mixer.compress_ratio == 4 else 8
        span = overlap * mixer.compress_ratio
        specs[f"{name}.compressor"] = windowed(block, 2 * overlap * width, 2 * overlap * width * 4, span)
        specs[name] = compressed(width, token_bytes, "sparse")
        if mixer.index_head_dim:
            index = _index_key_bytes(mixer)
            state = 2 * overlap * mixer.index_head_dim
            specs[f"{name}.index.compressor"] = windowed(block, state, state * 4, span)
            specs[f"{name}.index"] = compressed(index, index, "indexer")
    return specs


def _state_blocks(mixer: StateSpace, cache_mode: str, drafted_tokens: int, release: Release) -> tuple[int, bool]:
    """(states a request of any length holds, whether each block of tokens adds one); `cache_mode`: mamba_cache_mode."""
    if release.before("0.11.1"):
        return 1, False
    if release.before("0.15.0"):
        return 0, True
    if cache_mode == "all":
        return drafted_tokens if release.at_least("0.22.0") else 0, True
    if cache_mode == "align":
        # 0.29+: Mamba-2 and KDA prefills write a checkpoint state within one pass.
        checkpoint = release.at_least("0.29.0") and mixer.kind in ("mamba2", "kda")
        return 2 + drafted_tokens + int(checkpoint), False
    return 1 + drafted_tokens, False


def _state_bytes(mixer: StateSpace, model: Model, settings: EngineSettings) -> int:
    """Bytes of the convolution and recurrent state of one layer on one tensor-parallel rank."""
    conv_elements, recurrent_elements = _STATE_SHAPES[mixer.kind](mixer, settings)
    conv_dtype, recurrent_dtype = _state_dtypes(mixer, model, settings)
    return conv_elements * dtype_bytes(conv_dtype) + recurrent_elements * dtype_bytes(recurrent_dtype)


def state_elements(mixer: StateSpace, settings: EngineSettings) -> int:
    """Elements of the convolution and recurrent state of one layer on one tensor-parallel rank."""
    return sum(_STATE_SHAPES[mixer.kind](mixer, settings))


def _state_dtypes(mixer: StateSpace, model: Model, settings: EngineSettings) -> tuple[str, str]:
    """(dtype of the convolution state, of the recurrent state): from flags, the config, or the model's dtype."""
    given_conv = settings.given.mamba_cache_dtype or "auto"
    conv = settings.dtype if given_conv == "auto" else given_conv
    given = settings.given.mamba_ssm_cache_dtype or "auto"
    if given != "auto":
        return conv, given
    configured = model.config.get("mamba_ssm_cache_dtype") or model.config.get("mamba_ssm_dtype")
    if "NemotronH" in model.architecture and settings.release.at_least("0.12.0"):
        # Nemotron-H: only float32 states are known to keep accuracy, so it is the default.
        return conv, configured if isinstance(configured, str) else "float32"
    if "Qwen3_5" in model.architecture and isinstance(configured, str):
        return conv, configured
    return (conv, "float32") if mixer.kind == "kda" else (conv, conv)


def _conv_tail(mixer: StateSpace, settings: EngineSettings) -> int:
    """Tokens in the convolution state: the kernel's, and drafted tokens not yet accepted."""
    return mixer.width("conv_kernel") - 1 + settings.num_speculative_tokens


def _mamba1(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    """(elements of a Mamba-1 layer's convolution state, of its recurrent state) on one rank."""
    inner = share(mixer.width("intermediate_size"), settings.tensor_parallel_size, "the Mamba inner size")
    return inner * (mixer.width("conv_kernel") - 1), inner * mixer.width("state_size")


def _mamba2(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    """(elements of a Mamba-2 layer's convolution state, of its recurrent state) on one rank."""
    groups = mixer.width("n_groups")
    if groups % settings.tensor_parallel_size:
        groups = settings.tensor_parallel_size  # groups are replicated to every rank
    conv = share(
        mixer.width("intermediate_size") + 2 * groups * mixer.width("state_size"),
        settings.tensor_parallel_size,
        "the Mamba width",
    )
    heads = share(mixer.width("num_heads"), settings.tensor_parallel_size, "the number of Mamba heads")
    return conv * _conv_tail(mixer, settings), heads * mixer.width("head_dim") * mixer.width("state_size")


def _gdn(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    """(elements of a gated delta net's convolution state, of its recurrent state) on one rank."""
    key_width = mixer.width("head_k_dim") * mixer.width("num_k_heads")
    value_width = mixer.width("head_v_dim") * mixer.width("num_v_heads")
    conv = share(2 * key_width + value_width, settings.tensor_parallel_size, "the linear-attention width")
    heads = share(mixer.width("num_v_heads"), settings.tensor_parallel_size, "the number of linear-attention heads")
    return conv * _conv_tail(mixer, settings), heads * mixer.width("head_v_dim") * mixer.width("head_k_dim")


def _kda(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    """(elements of a Kimi delta attention layer's convolution state, of its recurrent state) on one rank."""
    heads, head_dim = mixer.width("num_heads"), mixer.width("head_dim")
    conv = share(3 * heads * head_dim, settings.tensor_parallel_size, "the linear-attention width")
    own = share(heads, settings.tensor_parallel_size, "the number of linear-attention heads")
    return conv * _conv_tail(mixer, settings), own * head_dim * head_dim


def _lightning(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    """(0, elements of a lightning attention layer's recurrent state on one rank): it has no convolution."""
    return 0, (mixer.width("num_heads") // settings.tensor_parallel_size) * mixer.width("head_dim") ** 2


def _short_conv(mixer: StateSpace, settings: EngineSettings) -> tuple[int, int]:
    """(elements of a short convolution's state on one rank, 0): it has no recurrent state."""
    width = share(mixer.width("intermediate_size"), settings.tensor_parallel_size, "the convolution width")
    return width * _conv_tail(mixer, settings), 0


_STATE_SHAPES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _gdn,
    "kda": _kda,
    "lightning": _lightning,
    "short_conv": _short_conv,
}
