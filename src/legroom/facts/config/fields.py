"""The fields of a config.json: nested text configs, alternative names, defaults and sanity limits."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from legroom.errors import LegroomError
from legroom.facts import read_data

NESTED_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "text_model_config")
"""Keys of the language model's config in multimodal checkpoints."""

ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim", "embed_dim", "hidden_dim_size"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    "num_key_value_heads": (
        *("n_head_kv", "num_kv_heads", "n_kv_heads", "kv_heads", "multi_query_group_num", "num_attention_groups"),
        "num_query_groups",
    ),
    "head_dim": ("head_size", "hidden_size_per_head", "kv_channels", "attention_head_dim", "d_kv"),
    "intermediate_size": (
        *("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_size", "decoder_ffn_dim", "hidden_dim"),
    ),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
}
"""The canonical name of a width, and its other names in released configs."""

EXPERT_COUNTS = frozenset({"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"})
"""Alternative names of the expert count; a config with one of them gets no default for the others."""

LENGTH_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Fields from which vLLM derives max_model_len."""

_LIMITS = {
    "num_hidden_layers": 2_000,
    "encoder_layers": 2_000,
    "hidden_size": 1_000_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
}


@cache
def config_defaults() -> dict[str, dict[str, Any]]:
    """Default field values of each model type's Hugging Face configuration class."""
    return dict(read_data("config_defaults.json")["defaults"])


@cache
def architecture_table() -> tuple[dict[str, str], frozenset[str]]:
    """(the architecture of each model type, all architectures that vLLM serves)."""
    document = read_data("architectures.json")
    return document["architectures"], frozenset(document["known"])


def nested_text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The sub-config of the language model; None for a flat config."""
    for key in NESTED_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return nested
    for key in ("thinker_config", "language_model", "decoder"):
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            inner = nested_text_config(nested)
            if inner is not None or any(name in nested for name in ("num_hidden_layers", "hidden_size")):
                return inner or nested
    return None


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the config with values replaced by `overrides`; nested `*_config` sections are merged, as in vLLM."""
    changed = dict(config)
    for key, value in (overrides or {}).items():
        inside = isinstance(value, Mapping) and isinstance(changed.get(key), Mapping) and key.endswith("_config")
        changed[key] = overridden(changed[key], value) if inside else value
    return changed


def canonical_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields under their canonical names, with the defaults of its configuration class."""
    nested = nested_text_config(config)
    text = dict(nested if nested is not None else config)
    if nested is not None:
        inherited = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
        for key in (*inherited, "transformers_version"):
            if text.get(key) is None and config.get(key) is not None:
                text[key] = config[key]
    attn = text.get("attn_config")
    if isinstance(attn, Mapping) and isinstance(attn.get("kv_n_heads"), int):
        text.setdefault("num_key_value_heads", attn["kv_n_heads"])
    for name, others in ALIASES.items():
        if text.get(name) is None:
            value = next((text[other] for other in others if text.get(other) is not None), None)
            if value is not None:
                text[name] = value
    if text.get("is_encoder_decoder") and text.get("decoder_layers"):  # Whisper's num_hidden_layers are its encoder's
        text["num_hidden_layers"] = text["decoder_layers"]
    if text.get("num_hidden_layers") is None:  # Nemotron-3-Ultra only lists its layers
        listed = text.get("layers_block_type") or text.get("layer_types")
        if isinstance(listed, list) and listed:
            text["num_hidden_layers"] = len(listed)
    text["model_type"] = text_model_type(text, config)
    essential = {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"}
    # Null and 0 mean "has none" (DeepSeek-V2-Lite, Gemma-4-26B), and are often left out.
    withheld = {"q_lora_rank", "hidden_size_per_layer_input"}
    if any(text.get(name) is not None for name in EXPERT_COUNTS):
        withheld |= EXPERT_COUNTS
    if any(text.get(name) is not None for name in LENGTH_NAMES):
        withheld |= {"max_position_embeddings"}
    for name, value in config_defaults().get(text["model_type"], {}).items():
        # A flat config without its widths is broken; a nested one holds only the differences from its class.
        if text.get(name) is None and name not in withheld and (nested is not None or name not in essential):
            text[name] = value
    return text


def text_model_type(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The model type of the language model: `llama` for `llava (llama text)`, `gemma3_text` for `gemma3`."""
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    described = re.fullmatch(r"\S+ \((\S+) text\)", model_type)
    if described:
        return described.group(1)
    defaults = config_defaults()
    return f"{model_type}_text" if model_type not in defaults and f"{model_type}_text" in defaults else model_type


def int_field(config: Mapping[str, Any], name: str, *, low: int = 1, default: int | None = None) -> int:
    """The config's field `name` (a list's largest item) if `low` or more, else `default`; or LegroomError."""
    value = config.get(name)
    if value is None:
        if default is not None:
            return default
        known = ", ".join((name, *ALIASES.get(name, ())[:3]))
        raise LegroomError(f"the model config has no {name}", f"a config.json of a language model has one of: {known}")
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        value = max(value)  # OpenELM and DeciLM write one value a layer
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise LegroomError(f"{name} in the model config is {value!r}, not a whole number", "check the config.json")
    high = _LIMITS.get(name, 2**40)
    if not low <= value <= high:
        hint = f"it should lie between {low} and {high:,}"
        raise LegroomError(f"{name} in the model config is {value}, which no model has", hint)
    return value


def optional_int(config: Mapping[str, Any], name: str) -> int | None:
    """The config's field `name` as a whole number; None where it is missing, LegroomError where it is implausible."""
    return None if config.get(name) is None else int_field(config, name)
