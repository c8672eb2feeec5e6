"""The cache of every layer of a model on one pipeline stage."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

from legroom.facts.model import Attention, LatentAttention, Mixer, StateSpace, attending, recurrent
from legroom.facts.releases import Release
from legroom.facts.releases import release as known_release
from legroom.memory.dtypes import head_token_bytes, latent_token_bytes
from legroom.memory.kv.attention_backend import aligned_block_size, block_size_before_alignment, state_cache_mode
from legroom.memory.kv.specs import (
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LatentSpec,
    LatentWindowSpec,
    SlidingWindowSpec,
    StateSpec,
    align_page,
)
from legroom.memory.kv.states import state_bytes
from legroom.memory.stages import stage_range
from legroom.records import dataclass
from legroom.vllm.args import WITHOUT_CACHE, draft_method, predicts_itself

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

DRAFT = "draft."
"""How the names of a draft's layers begin."""
WHOLE_REQUEST = 1 << 40
"""Tokens a block where a state stands for the whole request: vLLM writes max_model_len, which no request exceeds."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """What every spec of one deployment shares."""

    model: Model
    settings: EngineSettings
    release: Release
    block_size: int
    in_flight_tokens: int
    state_mode: str
    state_padding: int | None

    @property
    def kv_cache_dtype(self) -> str:
        """V1's Falcon layers never hear of --kv-cache-dtype and keep the model's own precision."""
        deaf = self.model.architecture == "FalconForCausalLM" and self.settings.engine == "V1"
        return "auto" if deaf else self.settings.kv_cache_dtype


def kv_specs(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int) -> dict[str, CacheSpec]:
    """The cache spec of every layer of one stage, by layer name, in the model's order. Draft layers come last."""
    terms = _terms(model, settings, gpu)
    specs: dict[str, CacheSpec] = {}
    for index in stage_range(len(model.layers), settings, pp_rank):
        layer = model.layers[index]
        for position, mixer in enumerate((layer.mixer, *layer.also)):
            if mixer is not None:
                specs.update(_layer_specs(mixer, f"{index}.{position}", terms))
    if pp_rank == settings.pipeline_parallel_size - 1:
        for index, mixer in enumerate(draft_mixers(model, settings)):
            specs.update(_layer_specs(mixer, f"{DRAFT}{index}", terms))
    return specs


def block_size(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Tokens a block of the attention layers, after every alignment."""
    return _terms(model, settings, gpu).block_size


def draft_mixers(model: Model, settings: EngineSettings) -> tuple[Mixer, ...]:
    """Attention layers that speculative decoding adds to the pool: those of a draft as wide as its own config says."""
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
    # An EAGLE head is one full-attention layer of the target's own width.
    return ((full or attention)[-1],) if attention and method.startswith("eagle") else ()


def _terms(model: Model, settings: EngineSettings, gpu: Gpu) -> _Terms:
    release = known_release(settings.release)
    batches = settings.max_concurrent_batches if release.at_least("0.26.0") else 1
    size = block_size_before_alignment(model, settings, gpu)
    mode = state_cache_mode(model, settings)
    padding = None
    states = recurrent(layer.mixer for layer in model.layers)
    token_bytes = _attention_token_bytes(model, settings)
    if states and token_bytes:
        largest = max(state_bytes(mixer, model, settings) for mixer in dict.fromkeys(states))
        size = aligned_block_size(model, settings, gpu, size, token_bytes=token_bytes, state_bytes=largest)
        padding = size * token_bytes if release.at_least("0.10.0") else None
    return _Terms(model, settings, release, size, batches * settings.max_num_batched_tokens, mode, padding)


def _attention_token_bytes(model: Model, settings: EngineSettings) -> int:
    """One token of one attention layer, as the hybrid alignment computes it; 0 without attention."""
    for layer in model.layers:
        for mixer in (layer.mixer, *layer.also):
            if token_bytes := _token_bytes(mixer, settings):
                return token_bytes
    return 0


@singledispatch
def _token_bytes(mixer: Mixer | None, settings: EngineSettings) -> int:
    return 0


@_token_bytes.register(LatentAttention)
def _latent_bytes(mixer: LatentAttention, settings: EngineSettings) -> int:
    return latent_token_bytes(mixer.latent_width, settings.kv_cache_dtype, settings.dtype)


@_token_bytes.register(Attention)
def _heads_bytes(mixer: Attention, settings: EngineSettings) -> int:
    if mixer.shares_kv or not mixer.causal:
        return 0
    width = head_token_bytes(mixer.head_dim, mixer.head_dim, settings.kv_cache_dtype, settings.dtype)
    return _heads(mixer, settings) * width


def _heads(mixer: Attention, settings: EngineSettings) -> int:
    """KV heads of one rank; ranks beyond the number of heads hold copies."""
    return max(1, mixer.kv_heads // settings.tensor_parallel_size)


@singledispatch
def _layer_specs(mixer: Mixer, name: str, terms: _Terms) -> dict[str, CacheSpec]:
    """The caches that a mixer keeps, by name."""
    raise TypeError(type(mixer))


@_layer_specs.register(StateSpace)
def _state_specs(mixer: StateSpace, name: str, terms: _Terms) -> dict[str, CacheSpec]:
    return {name: _state_spec(mixer, terms)}


@_layer_specs.register(Attention)
def _attention_specs(mixer: Attention, name: str, terms: _Terms) -> dict[str, CacheSpec]:
    if mixer.shares_kv or (not mixer.causal and not mixer.cross):
        return {}
    specs: dict[str, CacheSpec] = {name: _attention_spec(mixer, terms)}
    if mixer.index_head_dim:
        width = mixer.index_head_dim * 2  # MiniMax-M3: a bfloat16 index key a token, on every rank
        specs[f"{name}.index"] = LatentSpec(terms.block_size, 1, mixer.index_head_dim, 0, width, role="indexer")
    return specs


def _attention_spec(mixer: Attention, terms: _Terms) -> CacheSpec:
    settings = terms.settings
    heads = _heads(mixer, settings)
    v_head_dim = mixer.v_head_dim if terms.release.at_least("0.14.0") else mixer.head_dim
    # The backends for unequal key and value widths (MiMo-V2) and for block-sparse layers (MiniMax-M3) pack no scales.
    token_bytes = heads * head_token_bytes(
        mixer.head_dim,
        v_head_dim,
        terms.kv_cache_dtype,
        settings.dtype,
        packs_scales=mixer.head_dim == v_head_dim and not mixer.index_head_dim,
    )
    size = terms.block_size
    if mixer.cross:
        # 0.11+ reserves for the whole encoder budget of a step, 0.10.2 for the longest input.
        budget = settings.max_num_batched_tokens
        if terms.release.before("0.11.0"):
            budget = int(terms.model.config.get("max_source_positions") or budget)
        return CrossAttentionSpec(size, heads, mixer.head_dim, v_head_dim, token_bytes, encoder_tokens=budget)
    if mixer.window is not None:
        return SlidingWindowSpec(
            size,
            heads,
            mixer.head_dim,
            v_head_dim,
            token_bytes,
            window=mixer.window,
            in_flight_tokens=terms.in_flight_tokens,
            retained_tokens=_retained_tokens(terms),
        )
    if mixer.chunk is not None and terms.release.at_least("0.10.0"):
        return ChunkedLocalSpec(
            size,
            heads,
            mixer.head_dim,
            v_head_dim,
            token_bytes,
            chunk=mixer.chunk,
            in_flight_tokens=terms.in_flight_tokens,
        )
    return FullAttentionSpec(
        size, heads, mixer.head_dim, v_head_dim, token_bytes, context_shards=context_shards(settings)
    )


def context_shards(settings: EngineSettings) -> int:
    """Ranks a sequence is split over: DCP from 0.10.2; PCP counted too from 0.12.0 to 0.25.1."""
    release = known_release(settings.release)
    shards = settings.decode_context_parallel_size if release.at_least("0.10.2") else 1
    if release.at_least("0.12.0") and release.before("0.26.0"):
        shards *= settings.prefill_context_parallel_size
    return shards


def _retained_tokens(terms: _Terms) -> int:
    """0.28+: multi-module MTP may prefill its last tokens again, so their blocks are kept below the window."""
    if terms.release.before("0.28.0") or len(terms.model.draft_layers) < 2:
        return 0
    method = draft_method(terms.settings.given.speculative_config)
    return max(0, terms.settings.num_speculative_tokens - 1) if predicts_itself(method) else 0


@_layer_specs.register(LatentAttention)
def _latent_specs(mixer: LatentAttention, name: str, terms: _Terms) -> dict[str, CacheSpec]:
    if mixer.window is not None:
        return _compressed_specs(name, mixer, terms)
    if not keeps_latent(terms.settings):
        return {name: _unfolded_spec(mixer, terms)}
    settings = terms.settings
    width = mixer.latent_width
    dtype = settings.kv_cache_dtype
    if mixer.index_head_dim and dtype.startswith("fp8"):
        dtype = "fp8_ds_mla"
    token_bytes = latent_token_bytes(width, dtype, settings.dtype)
    if settings.engine == "V0" and terms.release.within("0.7.2", "0.7.3"):
        token_bytes = -(-token_bytes // 256) * 256  # entries were padded to 256 bytes then
    shards = context_shards(settings)
    specs: dict[str, CacheSpec] = {
        name: LatentSpec(
            terms.block_size,
            1,
            width,
            0,
            token_bytes,
            context_shards=shards,
            leads=bool(mixer.index_head_dim) and terms.release.at_least("0.31.0"),
        )
    }
    if mixer.index_head_dim:
        index = mixer.index_head_dim + mixer.index_head_dim // 128 * 4  # fp8 keys and a float32 scale every 128
        specs[f"{name}.index"] = LatentSpec(terms.block_size, 1, index, 0, index, context_shards=shards, role="indexer")
    return specs


def keeps_latent(settings: EngineSettings) -> bool:
    """0.7.1+ caches the latent itself, unless told not to."""
    return known_release(settings.release).at_least("0.7.1") and settings.given.env.get("VLLM_MLA_DISABLE", "0") != "1"


def _unfolded_spec(mixer: LatentAttention, terms: _Terms) -> FullAttentionSpec:
    """Latent attention cached as full heads; until 0.7.0 a head of 192 was padded to 256."""
    head_dim = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    if terms.release.before("0.7.1"):
        head_dim = max(head_dim, 256)
    heads = max(1, mixer.heads // terms.settings.tensor_parallel_size)
    token_bytes = heads * head_token_bytes(head_dim, head_dim, terms.settings.kv_cache_dtype, terms.settings.dtype)
    return FullAttentionSpec(terms.block_size, heads, head_dim, head_dim, token_bytes)


def _compressed_specs(name: str, mixer: LatentAttention, terms: _Terms) -> dict[str, CacheSpec]:
    """DeepSeek-V4: a window of raw states, compressed states, their compressor's state and an indexer."""
    packed = terms.settings.kv_cache_dtype in ("auto", "fp8", "fp8_ds_mla", "fp8_e4m3")
    alignment = 576 if packed else 512
    width = mixer.latent_width
    token_bytes = 584 if packed else latent_token_bytes(width, terms.settings.kv_cache_dtype, terms.settings.dtype)
    window = mixer.window or 0

    def windowed(block: int, head_dim: int, row_bytes: int, span: int) -> LatentWindowSpec:
        return LatentWindowSpec(
            block,
            1,
            head_dim,
            0,
            row_bytes,
            align_page(row_bytes, block, alignment),
            window=span,
            in_flight_tokens=terms.in_flight_tokens,
            retained_tokens=_retained_tokens(terms),
        )

    def compressed(head_dim: int, row_bytes: int, role: str) -> LatentSpec:
        states = terms.block_size // mixer.compress_ratio
        return LatentSpec(
            terms.block_size,
            1,
            head_dim,
            0,
            row_bytes,
            align_page(row_bytes, states, alignment),
            mixer.compress_ratio,
            role=role,
        )

    specs: dict[str, CacheSpec] = {f"{name}.window": windowed(64, width, token_bytes, window)}
    if mixer.compress_ratio > 1:
        overlap = 2 if mixer.compress_ratio == 4 else 1
        block = 4 if mixer.compress_ratio == 4 else 8
        span = overlap * mixer.compress_ratio
        specs[f"{name}.compressor"] = windowed(block, 2 * overlap * width, 2 * overlap * width * 4, span)
        specs[name] = compressed(width, token_bytes, "sparse")
        if mixer.index_head_dim:
            index = mixer.index_head_dim + mixer.index_head_dim // 128 * 4
            state = 2 * overlap * mixer.index_head_dim
            specs[f"{name}.index.compressor"] = windowed(block, state, state * 4, span)
            specs[f"{name}.index"] = compressed(index, index, "indexer")
    return specs


def _state_spec(mixer: StateSpace, terms: _Terms) -> StateSpec:
    settings, release = terms.settings, terms.release
    size = state_bytes(mixer, terms.model, settings)
    padded = terms.state_padding if terms.state_padding and terms.state_padding != size else None
    whole = settings.given.mamba_block_size or WHOLE_REQUEST
    block = whole if terms.state_mode == "none" else terms.block_size
    blocks, per_length = _state_blocks(mixer, terms.state_mode, settings.num_speculative_tokens, release)
    return StateSpec(block, size, blocks, per_length, padded, mixer.kind)


def _state_blocks(mixer: StateSpace, mode: str, speculative: int, release: Release) -> tuple[int, bool]:
    """States a request holds, and whether one more comes with every block of tokens."""
    if release.before("0.11.1"):
        return 1, False
    if release.before("0.15.0"):
        return 0, True
    if mode == "all":
        return speculative if release.at_least("0.22.0") else 0, True
    if mode == "align":
        # 0.29+: Mamba-2 and KDA prefills export a checkpoint from inside one pass, which holds a state of its own.
        checkpoint = release.at_least("0.29.0") and mixer.kind in ("mamba2", "kda")
        return 2 + speculative + int(checkpoint), False
    return 1 + speculative, False
