"""The attention or recurrent mixer of every layer, from a config.json."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config.fields import int_field, optional_int
from legroom.facts.config.layer_patterns import mixer_kinds
from legroom.facts.model import Attention, LatentAttention, Mixer, StateSpace, attending, latent


def _first_number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of the config's fields `names` that is a number, else `default`; LegroomError if that is None too."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int_field(config, name, low=0)
    return int_field(config, names[0], default=default)


def _mamba1_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of a Mamba-1 mixer, by name, from the text config."""
    hidden = int_field(config, "hidden_size")
    expand = _first_number(config, "mamba_expand", "expand", default=2) or 2
    inner = expand * hidden
    if config.get("mamba_expand") is None and isinstance(config.get("d_inner"), int):
        inner = int_field(config, "d_inner")
    rank = config.get("mamba_dt_rank", config.get("time_step_rank"))
    return {
        "intermediate_size": inner,
        "state_size": _first_number(config, "mamba_d_state", "state_size", "d_state", default=16),
        "conv_kernel": _first_number(config, "mamba_d_conv", "conv_kernel", "d_conv", default=4),
        "time_step_rank": rank if isinstance(rank, int) else math.ceil(hidden / 16),
    }


def _mamba2_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of a Mamba-2 mixer, by name, from the text config; LegroomError without heads."""
    hidden = int_field(config, "hidden_size")
    heads = _first_number(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", default=0)
    of_attention = config.get("n_mamba_heads") is not None  # Zamba2's head_dim
    names = ("mamba_head_dim", "mamba_d_head", "mamba_headdim", *(() if of_attention else ("head_dim",)))
    head_dim = _first_number(config, *names, default=0)
    inner = optional_int(config, "mamba_d_ssm") or 0
    if not inner and config.get("mamba_num_heads") is not None:
        inner = heads * head_dim  # Nemotron-H: expand is written but not used
    inner = inner or _first_number(config, "mamba_expand", "expand", default=2) * hidden
    heads = heads or (inner // head_dim if head_dim else 0)
    if not heads:
        raise LegroomError("the model config has no mamba_num_heads", "a Mamba-2 model needs its number of heads")
    return {
        "intermediate_size": inner,
        "n_groups": _first_number(config, "mamba_n_groups", "n_groups", "mamba_ngroups", default=1),
        "num_heads": heads,
        "head_dim": head_dim or inner // heads,
        "state_size": _first_number(config, "mamba_d_state", "ssm_state_size", "state_size", default=128),
        "conv_kernel": _first_number(config, "mamba_d_conv", "conv_kernel", default=4),
        "chunk_size": _first_number(config, "mamba_chunk_size", "chunk_size", default=256),
    }


def _gated_delta_net_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of a gated-delta-net mixer, by name, from the text config."""
    return {
        "num_k_heads": int_field(config, "linear_num_key_heads"),
        "num_v_heads": int_field(config, "linear_num_value_heads"),
        "head_k_dim": int_field(config, "linear_key_head_dim"),
        "head_v_dim": int_field(config, "linear_value_head_dim"),
        "conv_kernel": int_field(config, "linear_conv_kernel_dim", default=4),
    }


def _kda_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of a Kimi-delta-attention mixer, by name; LegroomError without `linear_attn_config`."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise LegroomError("the model config has no linear_attn_config", "a Kimi linear model needs one")
    return {
        "num_heads": int_field(linear, "num_heads"),
        "head_dim": int_field(linear, "head_dim"),
        "conv_kernel": int_field(linear, "short_conv_kernel_size", default=4),
        "full_rank_gate": int(bool(linear.get("use_full_rank_gate"))),
    }


def _lightning_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of a lightning-attention mixer, by name, from the text config."""
    heads = int_field(config, "num_attention_heads")
    head_dim = int_field(config, "head_dim", default=int_field(config, "hidden_size") // heads)
    return {"num_heads": heads, "head_dim": head_dim}


_STATE_SPACES: dict[str, Callable[[Mapping[str, Any]], dict[str, int]]] = {
    "mamba1": _mamba1_widths,
    "mamba2": _mamba2_widths,
    "gdn": _gated_delta_net_widths,
    "kda": _kda_widths,
    "lightning": _lightning_widths,
    "short_conv": lambda text: {
        "intermediate_size": int_field(text, "conv_dim", default=int_field(text, "hidden_size")),
        "conv_kernel": int_field(text, "conv_L_cache", default=3),
    },
}
_LATENT_TYPES = frozenset(
    {"axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "deepseek_ref"}
    | {"deepseek_mtp", "dots3_note", "glm_moe_dsa", "glm4_moe_lite", "glm5_next", "glm5_next_text", "kimi_k2"}
    | {"kimi_linear", "k3_dspark", "longcat_flash", "pangu_ultra_moe", "bailing_hybrid", "hy_v4"}
)
"""Model types whose attention vLLM serves as MLA (0.32.0); others with a kv_lora_rank have full heads."""
_O_BIAS: tuple[str, ...] = ("GPT2", "GPTNeoX", "GPTBigCode", "Bloom", "OPT", "Starcoder2", "PhiForCausal", "Whisper")
_O_BIAS += ("Bart", "GptOss", "Bert", "Roberta", "XLMRoberta")
_QKV_BIAS = (*_O_BIAS, "Qwen2", "QWen", "MiMoForCausal")
_QK_NORM = ("Qwen3", "Gemma3", "Gemma4", "Olmo2", "Olmo3", "Olmoe", "MiniMaxM2", "MiniMaxM3", "HunYuan", "Apertus")
_GATED_OUTPUT = ("Qwen3Next", "Qwen3_5")
_ENCODER_ONLY: tuple[str, ...] = ("BertModel", "BertFor", "BertSplade", "RobertaModel", "RobertaFor", "XLMRoberta")
_ENCODER_ONLY += ("ModernBert", "NomicBert", "GteModel", "GteNewModel", "JinaRoberta", "SnowflakeGte", "HF_ColBERT")
_ENCODER_ONLY += ("LlamaBidirectional",)


def mixers(config: Mapping[str, Any], architecture: str) -> tuple[Mixer | None, ...]:
    """The main mixer of every layer; None for layers without one (Nemotron-H blocks, DeciLM no-ops)."""
    kinds = mixer_kinds(config, architecture)
    return tuple(_mixer_of_layer(config, architecture, index, kind) for index, kind in enumerate(kinds))


def further_mixers(config: Mapping[str, Any], architecture: str) -> tuple[tuple[Mixer, ...], ...]:
    """The further mixers of every layer: cross attention, or the attention parallel to a Mamba mixer; else empty."""
    kinds = mixer_kinds(config, architecture)
    if any(word in architecture for word in ("Whisper", "BartFor", "MBart", "T5For", "CohereAsr", "Florence2")):
        cross = _attention_of_layer(config, architecture, "cross", 0)
        return tuple((cross,) for _ in kinds)
    return tuple(
        (_attention_of_layer(config, architecture, "full", index),) if kind.endswith("+full") else ()
        for index, kind in enumerate(kinds)
    )


def encoder_mixers(config: Mapping[str, Any], architecture: str) -> tuple[Mixer, ...]:
    """The attention layers of an encoder-decoder model's encoder; empty for other models."""
    if not any(word in architecture for word in ("Whisper", "BartFor", "MBart")):
        return ()
    heads = int_field(config, "encoder_attention_heads", default=int_field(config, "num_attention_heads"))
    head_dim = int_field(config, "hidden_size") // heads
    count = int_field(config, "encoder_layers", default=int_field(config, "num_hidden_layers"))
    return (Attention(heads, heads, head_dim, head_dim, qkv_bias=True, o_bias=True, causal=False),) * count


def mtp_mixers(config: Mapping[str, Any], layer_mixers: tuple[Mixer | None, ...]) -> tuple[Mixer, ...]:
    """A mixer for each multi-token-prediction layer, like the last full attention layer; empty without any."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")
    # Qwen3-Next's config does not count its MTP layers; vLLM builds one (measured: 3.07 GiB).
    unnamed = 1 if config.get("model_type") == "qwen3_next" else 0
    count = next((config[name] for name in names if isinstance(config.get(name), int)), unnamed)
    attention = attending(layer_mixers)
    if not attention or not 0 < count < 64:
        return ()
    if latent(attention[-1:]) and attention[-1].window is not None:
        first = int_field(config, "num_hidden_layers")
        return tuple(_deepseek_v4_attention(config, first + index) for index in range(count))
    return (([mixer for mixer in attention if mixer.window is None] or attention)[-1],) * count


def _mixer_of_layer(config: Mapping[str, Any], architecture: str, index: int, kind: str) -> Mixer | None:
    """The mixer of layer `index`, which is of `kind`; None for a kind without one; LegroomError for an unknown kind."""
    kind = kind.partition("+")[0]
    if kind == "none":
        return None
    if kind not in ("full", "sliding", "chunked", "latent", "latent_sliding"):
        if kind not in _STATE_SPACES:
            hint = "known: full, sliding, chunked, linear attention, mamba, conv"
            raise LegroomError(f"the model config has a layer of type {kind!r}, which legroom does not know", hint)
        return StateSpace(kind, tuple(sorted(_STATE_SPACES[kind](config).items())))
    if config.get("compress_ratios") is not None and config.get("head_dim") is not None and is_latent(config):
        return _deepseek_v4_attention(config, index)
    if is_latent(config):
        index_dim = int_field(config, "index_head_dim", default=0, low=0)
        return LatentAttention(
            heads=int_field(config, "num_attention_heads"),
            kv_lora_rank=int_field(config, "kv_lora_rank"),
            q_lora_rank=optional_int(config, "q_lora_rank"),
            qk_nope_head_dim=int_field(config, "qk_nope_head_dim", low=0),
            qk_rope_head_dim=int_field(config, "qk_rope_head_dim", low=0),
            v_head_dim=int_field(config, "v_head_dim"),
            index_heads=int_field(config, "index_n_heads", default=0, low=0),
            index_head_dim=index_dim if _has_indexer(config, index) else 0,
            output_gate=bool(config.get("mla_use_output_gate", False)),
        )
    return _attention_of_layer(config, architecture, kind, index)


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether vLLM serves the model as multi-head latent attention."""
    return str(config.get("model_type")) in _LATENT_TYPES and (
        config.get("kv_lora_rank") is not None or config.get("compress_ratios") is not None
    )


def _has_indexer(config: Mapping[str, Any], index: int) -> bool:
    """Whether a sparse layer has an indexer of its own: GLM-5.2 shares one among layers, dense models have none."""
    if not config.get("index_head_dim"):
        return False
    types = config.get("indexer_types")
    if isinstance(types, list) and index < len(types):
        return bool(types[index] != "shared")
    frequency = config.get("index_topk_freq")
    return not (isinstance(frequency, int) and frequency > 1 and index % frequency != 0)


def _deepseek_v4_attention(config: Mapping[str, Any], index: int) -> LatentAttention:
    """DeepSeek-V4: one shared latent head, a sliding window, and a compressed state per `compress_ratio` tokens."""
    ratios = config["compress_ratios"]
    ratio = ratios[index] if isinstance(ratios, list) and index < len(ratios) else 0
    rope_dim = int_field(config, "qk_rope_head_dim", low=0)
    return LatentAttention(
        heads=int_field(config, "num_attention_heads"),
        kv_lora_rank=int_field(config, "head_dim") - rope_dim,
        q_lora_rank=optional_int(config, "q_lora_rank"),
        qk_nope_head_dim=int_field(config, "head_dim") - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=int_field(config, "head_dim"),
        index_heads=int_field(config, "index_n_heads", default=64),
        index_head_dim=int_field(config, "index_head_dim", default=128) if ratio == 4 else 0,
        window=int_field(config, "sliding_window"),
        compress_ratio=int(ratio),
        o_groups=int_field(config, "o_groups", default=8),
        o_lora_rank=int_field(config, "o_lora_rank", default=1024),
    )


def _attention_of_layer(config: Mapping[str, Any], architecture: str, kind: str, index: int) -> Attention:
    """The attention of layer `index` (`kind`: full, sliding or chunked): heads and their sizes, window, biases."""
    has_bias = bool(config.get("attention_bias"))
    states_qkv_bias = bool(config.get("add_qkv_bias") or config.get("use_qkv_bias"))
    biased_o = str(config.get("model_type")) in ("llama", "granite", "internlm", "exaone4", "phimoe")
    shared = config.get("num_kv_shared_layers")
    bidirectional = architecture == "Gemma3TextModel" and config.get("use_bidirectional_attention") is True
    return Attention(
        *_head_shape(config, kind, index),
        window=int_field(config, "sliding_window") if kind == "sliding" else None,
        chunk=int_field(config, "attention_chunk_size", default=8192) if kind == "chunked" else None,
        shares_kv=isinstance(shared, int) and index >= int_field(config, "num_hidden_layers") - shared > 0,
        qkv_bias=_is_biased(config, architecture, _QKV_BIAS) or has_bias or states_qkv_bias,
        o_bias=_is_biased(config, architecture, _O_BIAS) or (has_bias and "GptOss" not in architecture and biased_o),
        qk_norm=architecture.startswith(_QK_NORM) or bool(config.get("use_qk_norm") or config.get("qk_layernorm")),
        output_gate=architecture.startswith(_GATED_OUTPUT) or bool(config.get("attention_output_gate", False)),
        sinks="GptOss" in architecture,
        causal=not (bidirectional or architecture.startswith(_ENCODER_ONLY) or config.get("is_causal") is False),
        cross=kind == "cross",
        index_head_dim=_sparse_index_dim(config, index),
    )


def _is_biased(config: Mapping[str, Any], architecture: str, families: tuple[str, ...]) -> bool:
    """Whether the architecture is of these families, and the config does not switch biases off."""
    if any(config.get(name) is False for name in ("use_bias", "bias", "enable_bias")):
        return False
    return architecture.startswith(families)


def _head_shape(config: Mapping[str, Any], kind: str, index: int) -> tuple[int, int, int, int]:
    """(heads, kv_heads, head_dim, v_head_dim) of layer `index` (of `kind`), unsplit; LegroomError if they clash."""
    heads = int_field(config, "num_attention_heads")
    hidden = int_field(config, "hidden_size")
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and index < len(blocks):
        group = (blocks[index].get("attention") or {}).get("n_heads_in_group")
        if isinstance(group, int) and group > 0:
            return heads, heads // group, *(2 * (_head_dim(config, heads, hidden),))
    if str(config.get("model_type")).startswith(("gemma4", "diffusion_gemma")):
        return _gemma4_head_shape(config, kind, heads)
    if config.get("swa_num_key_value_heads") is not None or config.get("swa_head_dim") is not None:
        return _mimo_head_shape(config, kind, heads)
    if config.get("kv_lora_rank") is not None and config.get("qk_nope_head_dim") is not None:
        # MLA weights with full heads in the cache (MiniCPM3): keys and values are padded to one head size.
        head_dim = int_field(config, "qk_nope_head_dim") + int_field(config, "qk_rope_head_dim", low=0)
        return heads, heads, head_dim, head_dim
    other = config.get("attention_other_setting")
    if kind == "sliding" and isinstance(other, Mapping):  # Step-3.5
        config = {**config, **other, "num_key_value_heads": other.get("num_attention_groups")}
    kv_heads = _int_of_layer(config, "num_key_value_heads", index)
    if kv_heads is None:
        kv_heads = _default_kv_heads(config, heads)
    per_layer = _int_of_layer(config, "num_attention_heads_per_layer", index)  # Laguna
    heads = per_layer or _int_of_layer(config, "num_attention_heads", index) or heads
    head_dim = _head_dim(config, heads, hidden)
    if kv_heads > heads or heads % kv_heads:
        why = f"the model config has {heads} attention heads for {kv_heads} key/value heads, which do not divide"
        raise LegroomError(why, "num_attention_heads must be a multiple of num_key_value_heads")
    v_head_dim = optional_int(config, "v_head_dim")
    return heads, kv_heads, head_dim, v_head_dim if v_head_dim and config.get("model_type") == "mimo_v2" else head_dim


def _default_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """KV heads without num_key_value_heads: multi-query (Falcon, StarCoder, ChatGLM), else one per attention head."""
    if config.get("multi_query_attention") and isinstance(config.get("multi_query_group_num"), int):
        return int(config["multi_query_group_num"])
    return 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else heads


def _int_of_layer(config: Mapping[str, Any], name: str, index: int) -> int | None:
    """The config's field `name` for layer `index`, one item if it is a list; None where it is missing."""
    value = config.get(name)
    if name == "num_key_value_heads" and config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # falcon-7b also writes n_head_kv
    if isinstance(value, list) and index < len(value):
        return int_field({name: value[index]}, name)
    return optional_int(config, name)


def _head_dim(config: Mapping[str, Any], heads: int, hidden: int) -> int:
    """The config's head_dim, else the hidden size over the heads; an error where that does not divide."""
    given = config.get("head_dim")
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return int_field(config, "head_dim")
    if heads > hidden or hidden % heads:
        hint = "the config needs a head_dim"
        raise LegroomError(f"hidden_size {hidden} does not divide over {heads} attention heads", hint)
    return hidden // heads


def _gemma4_head_shape(config: Mapping[str, Any], kind: str, heads: int) -> tuple[int, int, int, int]:
    """(heads, KV heads, key head size, value head size) of a Gemma-4 layer of `kind` sliding or full."""
    kv_heads = int_field(config, "num_key_value_heads")
    head_dim = int_field(config, "head_dim")
    if kind == "full":
        head_dim = int_field(config, "global_head_dim", default=512)
        if config.get("attention_k_eq_v"):
            kv_heads = int_field(config, "num_global_key_value_heads", default=kv_heads)
    return heads, kv_heads, head_dim, head_dim


def _mimo_head_shape(config: Mapping[str, Any], kind: str, heads: int) -> tuple[int, int, int, int]:
    """(heads, KV heads, key head size, value head size) of a layer; if `kind` is sliding from the `swa_` fields."""
    prefix = "swa_" if kind == "sliding" else ""
    kv_heads = int_field(config, f"{prefix}num_key_value_heads", default=int_field(config, "num_key_value_heads"))
    head_dim = int_field(config, f"{prefix}head_dim", default=int_field(config, "head_dim"))
    v_head_dim = int_field(config, f"{prefix}v_head_dim", default=int_field(config, "v_head_dim", default=head_dim))
    return int_field(config, f"{prefix}num_attention_heads", default=heads), kv_heads, head_dim, v_head_dim


def _sparse_index_dim(config: Mapping[str, Any], index: int) -> int:
    """The head size of the layer's sparse attention index; 0 where the layer has none."""
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, Mapping) or not sparse.get("use_sparse_attention", False):
        return 0
    frequency = sparse.get("sparse_attention_freq")
    on = frequency[index] if isinstance(frequency, list) and index < len(frequency) else 1
    return int_field(sparse, "sparse_index_dim", default=128) if on else 0
