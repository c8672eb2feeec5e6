"""The longest length vLLM derives from a config when no --max-model-len is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config.fields import LENGTH_NAMES

_ALREADY_SCALED = {"su", "longrope", "llama3"}
_YARN = {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}
_FALLBACK_LEN = 2048
"""vLLM assumes this where a config names no length at all."""


def derived_max_len(config: Mapping[str, Any], text: Mapping[str, Any], *, yarn_multiplies: bool = False) -> int:
    """The smallest length the config names, times its rope scaling.

    `yarn_multiplies`: older releases computed YaRN lengths as original length x factor; newer ones take
    max_position_embeddings as already scaled. The two agree for checkpoints that follow the convention.
    """
    lengths = {key: _length(text, key) for key in LENGTH_NAMES if text.get(key) is not None}
    if not lengths:
        return _FALLBACK_LEN
    derived: float = lengths.get("model_max_length") or min(lengths.values())
    ropes = list(_rope_parameters(text))
    if "gemma3" not in str(text.get("model_type")):
        derived = _scaled(derived, ropes, yarn_multiplies)
    if any(_rope_type(rope) in ("longrope", "su") for rope in ropes):
        original = text.get("original_max_position_embeddings")
        # 0.11.1+ starts LongRoPE models at their original length unless asked for more.
        if isinstance(original, int) and original > 0:
            return original
    return int(derived)


def _length(text: Mapping[str, Any], key: str) -> int:
    value = text[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise LegroomError(f"{key} in the model config is {value!r}, not a length", "check the config.json")
    return int(min(value, 2**40))


def _rope_parameters(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One set of parameters, or one for every layer type (Gemma-3, Gemma-4)."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if not isinstance(rope, Mapping):
            continue
        inner = [value for value in rope.values() if isinstance(value, Mapping)]
        yield from inner or [rope]
        return


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scaled(length: float, ropes: list[Mapping[str, Any]], yarn_multiplies: bool) -> float:
    factor = 1.0
    for rope in ropes:
        kind = _rope_type(rope)
        if kind in _ALREADY_SCALED or (kind in _YARN and not yarn_multiplies):
            continue
        value = rope.get("factor")
        factor = float(value) if isinstance(value, int | float) and value > 0 else factor
        if kind in _YARN and isinstance(rope.get("original_max_position_embeddings"), int):
            length = float(rope["original_max_position_embeddings"])
    return length * factor
