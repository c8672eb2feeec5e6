"""A `Model` from a config.json, and the max_model_len that vLLM derives from it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config import fields
from legroom.facts.config.feedforward import feedforwards
from legroom.facts.config.mixers import encoder_mixers, further_mixers, mixers, mtp_mixers
from legroom.facts.config.modalities import modalities
from legroom.facts.config.quantization import quantization
from legroom.facts.model import Layer, Mixer, Model, latent, with_kv_heads

_DTYPES = {"float16", "bfloat16", "float32"}
_DTYPE_NAMES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}

# vLLM serves a decoder with a sentence-transformers pooling config with the pooling runner. The config.json does not
# show that, so the model's name decides.
_NAMED_EMBEDDING = re.compile(r"(?<![a-z])embed(ding)?s?(?![a-z])", re.IGNORECASE)
_TextConfig = Mapping[str, Any]  # The language model's part of a config.json, under canonical names.


def model_from_config(config: Mapping[str, Any], name: str = "", source: str = "") -> Model:
    """The model of a config.json; `source`: where that is from, for the user. LegroomError where it describes none."""
    if not isinstance(config, Mapping) or not config:
        raise LegroomError("the model config is empty or not a JSON object", "pass a model's config.json")
    try:
        return _described_model(config, name, source)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise LegroomError(f"the model config has a wrong value: {error}", "check the config.json") from error


def _described_model(config: Mapping[str, Any], name: str, source: str) -> Model:
    """The model of a config.json, named `name`, read from `source`; any exception if a field has a wrong type."""
    text = fields.canonical_text_config(config)
    architecture = architecture_of(config, text)
    layer_mixers = mixers(text, architecture)
    blocks = feedforwards(text, architecture)
    further = further_mixers(text, architecture)
    if not len(layer_mixers) == len(blocks) == len(further):
        why = f"the model config describes {len(layer_mixers)} attention and {len(blocks)} feed-forward layers"
        raise LegroomError(why, "layer_types and block lists must have num_hidden_layers entries")
    kinds: dict[Layer, Layer] = {}
    layers = tuple(
        kinds.setdefault(layer, layer)  # equal layers are one object, which compares faster
        for layer in map(Layer, layer_mixers, blocks, further)
    )
    last_block = next((block for block in reversed(blocks) if block is not None), None)
    return Model(
        name=name or str(config.get("_name_or_path") or config.get("model_type") or "model"),
        architecture=architecture,
        model_type=str(text.get("model_type") or ""),
        dtype=dtype_of(config, text),
        hidden_size=fields.int_field(text, "hidden_size"),
        vocab_size=fields.int_field(text, "vocab_size"),
        max_position_embeddings=derived_max_len(text),
        layers=layers,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        quantization=quantization(config),
        modalities=modalities(config),
        encoder_layers=_encoder_layers(text, architecture),
        draft_layers=tuple(Layer(mixer, last_block) for mixer in mtp_mixers(text, layer_mixers)),
        is_pooling=_is_pooling(architecture, layer_mixers) or bool(_NAMED_EMBEDDING.search(name)),
        known=architecture in fields.architecture_table()[1],
        config=text,
        source=source,
    )


def architecture_of(config: Mapping[str, Any], text: _TextConfig) -> str:
    """The first architecture of the config, else of `text`, or that of the model type; empty where none is known."""
    for given in (config.get("architectures"), text.get("architectures")):
        if isinstance(given, list | tuple) and given and isinstance(given[0], str):
            return given[0]
    by_type, _ = fields.architecture_table()
    for model_type in (config.get("model_type"), text.get("model_type")):
        architecture = by_type.get(str(model_type)) or by_type.get(str(model_type).split(" ")[0])
        if architecture:
            return architecture
    return ""


def dtype_of(config: Mapping[str, Any], text: _TextConfig) -> str:
    """The checkpoint's dtype: float16, bfloat16 or float32; bfloat16 where the config states none of them."""
    for where in (config, text, config.get("vision_config") or {}):
        value = where.get("dtype") or where.get("torch_dtype") if isinstance(where, Mapping) else None
        if isinstance(value, str):
            dtype = value.removeprefix("torch.").lower()
            dtype = _DTYPE_NAMES.get(dtype, dtype)
            if dtype in _DTYPES:
                return dtype
    return "bfloat16"


def _encoder_layers(text: _TextConfig, architecture: str) -> tuple[Layer, ...]:
    """The layers of an encoder-decoder model's encoder; empty for other models."""
    mixed = encoder_mixers(text, architecture)
    if not mixed:
        return ()
    width = fields.int_field(text, "encoder_ffn_dim", default=4 * fields.int_field(text, "hidden_size"))
    encoder = {**text, "num_hidden_layers": len(mixed), "intermediate_size": width}
    return tuple(map(Layer, mixed, feedforwards(encoder, architecture)))


def _is_pooling(architecture: str, layer_mixers: tuple[Mixer | None, ...]) -> bool:
    """Whether vLLM serves the model for embeddings, scores or classes, without generating text."""
    heads = with_kv_heads(layer_mixers)
    encoder_only = bool(heads) and not latent(layer_mixers) and not any(mixer.causal for mixer in heads)
    outputs = ("ForSequenceClassification", "RewardModel", "EmbeddingModel", "ForTokenClassification", "ForMaskedLM")
    # vLLM serves a bare decoder (MistralModel, Qwen2Model) as an embedding model and drops its head.
    generating = ("LMHeadModel", "ChatModel", "LMModel", "OmniModel", "AudioModel", "UltravoxModel", "AquilaModel")
    bare = architecture.endswith("Model") and not architecture.endswith(generating)
    return encoder_only or bare or architecture.endswith(outputs)


_ALREADY_SCALED = {"su", "longrope", "llama3"}
_YARN = {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}
_FALLBACK_LEN = 2048  # vLLM assumes this where a config names no length at all.


def derived_max_len(text: _TextConfig, *, yarn_multiplies: bool = False) -> int:
    """The config's context length after RoPE scaling (the original one with LongRoPE), 2048 without any length;
    `yarn_multiplies`: YaRN's factor is applied, as up to 0.28.0."""
    lengths = {key: _config_length(text, key) for key in fields.LENGTH_NAMES if text.get(key) is not None}
    if not lengths:
        return _FALLBACK_LEN
    derived: float = lengths.get("model_max_length") or min(lengths.values())
    ropes = list(_rope_parameters(text))
    factor = 1.0
    for rope in ropes if "gemma3" not in str(text.get("model_type")) else ():
        kind = _rope_type(rope)
        if kind in _ALREADY_SCALED or (kind in _YARN and not yarn_multiplies):
            continue
        value, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        factor = float(value) if isinstance(value, int | float) and value > 0 else factor
        derived = float(original) if kind in _YARN and isinstance(original, int) and original > 0 else derived
    if any(_rope_type(rope) in ("longrope", "su") for rope in ropes):
        original = text.get("original_max_position_embeddings")
        # 0.11.1+ starts LongRoPE models at their original length by default.
        if isinstance(original, int) and original > 0:
            return original
    return int(derived * factor)


def _config_length(text: _TextConfig, key: str) -> int:
    """The config's field `key` as a number of tokens; LegroomError where it is no number of at least 1."""
    value = text[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise LegroomError(f"{key} in the model config is {value!r}, not a length", "check the config.json")
    return int(min(value, 2**40))


def _rope_parameters(text: _TextConfig) -> Iterator[Mapping[str, Any]]:
    """Each set of RoPE parameters in the config: one, or one per layer type (Gemma-3, Gemma-4)."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if not isinstance(rope, Mapping):
            continue
        yield from [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
        return


def _rope_type(rope: Mapping[str, Any]) -> str:
    """The kind of RoPE scaling, such as `yarn` or `linear`; `default` where none is stated."""
    return str(rope.get("rope_type") or rope.get("type") or "default")
