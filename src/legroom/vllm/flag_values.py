"""Values of flags, converted as vLLM's parsers do: human-readable counts, JSON, dotted keys, `image=2` pairs."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from legroom.vllm.args import ServeArgs

_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"(\d{1,18})(\.\d{1,9})?([kKmMgGtT])")
_PLAIN_INT = re.compile(r"[+-]?\d{1,18}")
_JSON_HUMAN = re.compile(r'("(?:[^"\\]|\\.)*")|\b(\d+(?:\.\d+)?)([kKmMgGtT])\b')
_MAX_JSON_CHARS = 100_000


class BadValue(Exception):
    """A value that does not match the flag's type; the text says what is expected."""


def read_int(text: str, *, human: bool) -> int:
    """A whole number; with `human` also `32k` (32,000) and `32K` (32,768); raises BadValue for other text."""
    text = text.strip()
    if _PLAIN_INT.fullmatch(text):
        return int(text)
    number = _HUMAN.fullmatch(text) if human else None
    if number is None:
        raise BadValue("a whole number" + (" like 4096, 32k (32,000) or 32K (32,768)" if human else ""))
    digits, fraction, letter = number.groups()
    if fraction and letter.isupper():
        raise BadValue(f"no fraction before {letter}: write {digits}{fraction}{letter.lower()} or a whole number")
    return int(float(digits + (fraction or "")) * _SCALES[letter])


def read_float(text: str) -> float:
    """A number; BadValue where it is none, infinite or not-a-number."""
    try:
        value = float(text)
    except ValueError:
        raise BadValue("a number") from None
    if not math.isfinite(value):
        raise BadValue("a finite number")
    return value


def read_json(text: str) -> Any:
    """The parsed JSON, in which a bare 80k counts thousands; raises BadValue for other text."""
    if len(text) > _MAX_JSON_CHARS:
        raise BadValue(f"JSON of at most {_MAX_JSON_CHARS:,} characters")
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_refuse_constant)
    try:
        return json.loads(_JSON_HUMAN.sub(_plain_number, text), parse_constant=_refuse_constant)
    except (ValueError, RecursionError, BadValue):
        raise BadValue("JSON like '{\"key\": 1}'") from None


def _refuse_constant(name: str) -> Any:
    """Raises ValueError: NaN and Infinity are not JSON."""
    raise ValueError(name)


def _plain_number(match: re.Match[str]) -> str:
    """A human-readable number such as `1k` as digits; quoted strings are unchanged."""
    return match[0] if match[1] is not None else str(read_int(match[0], human=True))


def read_pairs(text: str) -> dict[str, int]:
    """The dict of `image=2,video=1`, the syntax of limits up to 0.9; BadValue for other text."""
    pairs: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key:
            raise BadValue("pairs like image=2,video=1")
        pairs[key.strip().lower()] = read_int(value, human=False)
    return pairs


def dotted_value(text: str) -> Any:
    """The value in `--some-config.key VALUE`: JSON where it parses, a count such as 8k, or else the string itself."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_refuse_constant)
    with suppress(BadValue):
        return read_int(text, human=True)
    return text


def nested(keys: list[str], value: Any) -> dict[str, Any]:
    """A value under nested keys: {"a": {"b": value}} from ["a", "b"]."""
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated by `more`, recursively; lists are concatenated, as vLLM does with dotted keys."""
    result = dict(base)
    for key, value in more.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key] = merged(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            result[key] = before + value
        else:
            result[key] = value
    return result


FIELDS = {f.name: str(f.type) for f in fields(ServeArgs) if f.name not in ("usage", "env", "others")}
"""The fields of ServeArgs that are flags, by vLLM's `dest`, with their types."""

SPECULATIVE_FIELDS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
"""Flags up to 0.8.2 that are keys of --speculative-config since."""

NUMBER = re.compile(r"-\d+(\.\d+)?")


def looks_like_flag(token: str) -> bool:
    """Whether a word starts a flag; negative numbers do not."""
    return token.startswith("-") and len(token) > 1 and not NUMBER.fullmatch(token)


def as_words(value: Any) -> tuple[str, ...]:
    """A value as command-line words: () for a bare switch."""
    if value is True:
        return ()
    if isinstance(value, tuple | list) and all(isinstance(item, str | int | float) for item in value):
        return tuple(str(item) for item in value)
    return (json.dumps(value),) if isinstance(value, Mapping | list) else (str(value),)
