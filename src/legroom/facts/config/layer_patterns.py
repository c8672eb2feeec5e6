"""The kind of mixer of each layer: `full`, `sliding`, `chunked`, `none`, a recurrent kind, or `KIND+full`."""

import re
from collections.abc import Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config.fields import int_field

_SPARSE = ["deepseek_sparse_attention", "minimax_m3_sparse"]
_SPARSE += ["heavily_compressed_attention", "compressed_sparse_attention"]
_KINDS = {
    "full": ("full_attention", "attention", "global", "global_attention", "full", *_SPARSE),
    "sliding": ("sliding_attention", "sliding_window", "local", "local_attention", "sliding"),
    "chunked": ("chunked_attention",),
    "short_conv": ("conv", "short_conv"),
    "mamba": ("mamba", "mamba1", "mamba2"),
    "linear": ("linear_attention",),
    "mamba+full": ("hybrid",),
    "none": ("moe", "mlp"),
}
"""Kinds of layers, and how configs name them."""
_NAMES = {name: kind for kind, names in _KINDS.items() for name in names}

_INTERLEAVED = {
    2: ("gemma2", "gpt_oss"),
    4: ("cohere2", "cohere2_moe", "olmo3", "exaone4", "exaone_moe", "mellum"),
    5: ("gemma3n",),
    6: ("gemma3", "gemma4"),
}
"""Interleaved families: the last layer of every N has full attention."""
_FULL_EVERY = {family: every for every, families in _INTERLEAVED.items() for family in families}

_FULL_FIRST = {"step3p5": 4, "step3p7": 4, "laguna": 4}
"""Interleaved families: the first layer of every N has full attention."""


def mixer_kinds(config: Mapping[str, Any], architecture: str) -> tuple[str, ...]:
    """Each layer's kind (full, sliding, mamba2, gdn, none ...) by the text model's config; LegroomError for too few."""
    count = int_field(config, "num_hidden_layers")
    model_type = str(config.get("model_type") or "")
    kinds = _written_pattern(config, count, model_type) or _block_pattern(config)
    if not kinds:
        known = _state_space_pattern(config, count, model_type, architecture) or _interleaved(config, count, model_type)
        kinds = (
            _pattern_of_counts(config, count, model_type, known)
            or known
            or ("sliding" if _is_all_sliding(config, model_type) else "full",) * count
        )
    if len(kinds) < count:
        hint = "check layer_types in the config.json"
        raise LegroomError(f"the model config lists {len(kinds)} layer types for {count} layers", hint)
    return kinds[:count]


def _written_pattern(config: Mapping[str, Any], count: int, model_type: str) -> tuple[str, ...]:
    """The kinds of `count` layers from `layer_types` or one of its alternative fields; empty where all are missing."""
    linear = _linear_kind(model_type)
    for key in ("layer_types", "layers_block_type", "layer_type_list"):
        types = config.get(key)
        if isinstance(types, list) and types:
            kinds = tuple(_NAMES.get(str(kind), str(kind)) for kind in types)
            mamba = "mamba2" if model_type != "jamba" else "mamba1"
            named = tuple({"linear": linear, "mamba": mamba, "mamba+full": f"{mamba}+full"}.get(k, k) for k in kinds)
            return _without_window(named, config)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return tuple({"M": "mamba2", "*": "full", "-": "none", "E": "none"}.get(letter, "none") for letter in pattern)
    pattern = config.get("hybrid_layer_pattern")
    if isinstance(pattern, list) and pattern:
        return tuple("sliding" if flag == 1 else "full" for flag in pattern)
    if isinstance(config.get("attn_type_list"), list):
        return tuple("full" if flag == 1 else "lightning" for flag in config["attn_type_list"])
    linear_config = config.get("linear_attn_config")
    if isinstance(linear_config, Mapping) and isinstance(linear_config.get("kda_layers"), list):
        kda = set(linear_config["kda_layers"])
        return tuple("kda" if index + 1 in kda else "full" for index in range(count))
    return ()


def _pattern_of_counts(text: Mapping[str, Any], count: int, model_type: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of `count` layers by the text config's `layer_type_counts`: the family's pattern `usual` if its full
    layers are as many, else the full ones spread evenly; empty unless full layers and one other kind are counted."""
    counts = text.get("layer_type_counts")
    if not isinstance(counts, Mapping) or not all(isinstance(number, int) for number in counts.values()):
        return ()
    named = {_NAMES.get(str(kind), str(kind)): number for kind, number in counts.items() if number > 0}
    full = named.get("full", 0)
    others = [kind for kind in named if kind != "full"]
    if sum(named.values()) != count or not full or len(others) != 1:
        return ()
    if usual.count("full") == full:
        return usual
    other = {"linear": _linear_kind(model_type), "mamba": "mamba2"}.get(others[0], others[0])
    ends = {(turn + 1) * count // full - 1 for turn in range(full)}
    return _without_window(tuple("full" if index in ends else other for index in range(count)), text)


def _without_window(kinds: tuple[str, ...], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers' kinds, each `sliding` one as `full` where the config has no sliding_window."""
    if config.get("sliding_window") is not None:
        return kinds
    return tuple("full" if kind == "sliding" else kind for kind in kinds)


def _block_pattern(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The pattern from `block_configs` (DeciLM, Nemotron-NAS), where a layer may have no attention; else empty."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, Mapping) for block in blocks):
        return ()
    if any("block_type" in block for block in blocks):
        names = {"mamba": "mamba2", "attention": "full"}
        return tuple(names.get(str(block.get("block_type")), "none") for block in blocks)
    attentions = (block.get("attention") or {} for block in blocks)
    return tuple("none" if each.get("no_op") or each.get("replace_with_linear") else "full" for each in attentions)


def _state_space_pattern(text: Mapping[str, Any], count: int, model_type: str, architecture: str) -> tuple[str, ...]:
    """Each of `count` layers' kind in a hybrid or state-space model, by its text config; empty for other models."""
    if model_type in ("mamba", "falcon_mamba"):
        return ("mamba1",) * count
    if model_type == "mamba2" or architecture == "Mamba2ForCausalLM":
        return ("mamba2",) * count
    if model_type == "falcon_h1":
        return ("mamba2+full",) * count
    if model_type == "jamba":
        period, offset = int_field(text, "attn_layer_period", default=8), int_field(text, "attn_layer_offset", low=0)
        return tuple("full" if index % period == offset else "mamba1" for index in range(count))
    if model_type in ("bamba", "granitemoehybrid"):
        attention = text.get("attn_layer_indices") or ()
        return tuple("full" if index in attention else "mamba2" for index in range(count))
    if model_type == "zamba2":
        hybrid = text.get("hybrid_layer_ids") or range(6, count, 6)
        return tuple("mamba2+full" if index in hybrid else "mamba2" for index in range(count))
    if model_type in ("lfm2", "lfm2_moe"):
        full = text.get("full_attn_idxs") or ()
        return tuple("full" if index in full else "short_conv" for index in range(count)) if full else ()
    every = text.get("full_attention_interval")
    if isinstance(every, int) and every > 0 and text.get("linear_num_value_heads") is not None:
        return tuple("full" if (index + 1) % every == 0 else "gdn" for index in range(count))
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"):
        return tuple("full" if (index + 1) % 4 == 0 else "gdn" for index in range(count))
    if model_type in ("minimax", "minimax_text_01"):
        return tuple("full" if (index + 1) % 8 == 0 else "lightning" for index in range(count))
    return ()


def _linear_kind(model_type: str) -> str:
    """The kind of a model's linear attention layers: lightning, kda or gdn."""
    kinds = {"minimax": "lightning", "minimax_text_01": "lightning", "kimi_linear": "kda", "glm5_next_text": "kda"}
    return kinds.get(model_type, "gdn")


def _interleaved(config: Mapping[str, Any], count: int, model_type: str) -> tuple[str, ...]:
    """The kinds of `count` layers in families that mix sliding or chunked layers with full ones; empty for others."""
    if model_type in ("llama4", "llama4_text"):
        rope = config.get("no_rope_layers") or [int((index + 1) % 4 != 0) for index in range(count)]
        chunk = config.get("attention_chunk_size", 8192)
        return tuple("chunked" if flag and chunk else "full" for flag in rope)
    if config.get("sliding_window") is None:
        return ()
    written = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(written, str):
        return tuple("full" if written[index % len(written)] == "G" else "sliding" for index in range(count))
    family = model_type.removesuffix("_text")
    words = str(config.get("layer_pattern") or "")  # `3 sliding : 1 full`
    ratio = re.match(r"(\d+) sliding\s*:\s*1 full", words)
    told = int(ratio.group(1)) + 1 if ratio else 2 if words.startswith("alternating") else None
    every = written if isinstance(written, int) and written > 0 else _FULL_EVERY.get(family) or told
    if every and model_type not in _FULL_FIRST:
        kinds = ["full" if (index + 1) % every == 0 else "sliding" for index in range(count)]
        if family == "gemma4":
            kinds[-1] = "full"  # Gemma-4 ends on a full-attention layer whatever the pattern
        return tuple(kinds)
    first = _FULL_FIRST.get(model_type)
    return tuple("full" if index % first == 0 else "sliding" for index in range(count)) if first else ()


def _is_all_sliding(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether every layer has the config's sliding_window (Mistral-7B-v0.1, Phi-3; Qwen with use_sliding_window)."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return False
    return not (model_type.startswith("qwen") and not config.get("use_sliding_window"))
