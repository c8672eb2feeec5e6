"""The state of reading one command line: what was stored so far, and how a value enters it.

Values are read as vLLM's parsers do: human-readable counts, JSON, dotted keys, `image=2` pairs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from legroom.facts.flags import Flag, choices, flags_of
from legroom.facts.releases import Release, successor
from legroom.vllm.args import ServeArgs, Usage
from legroom.vllm.flag_problems import FlagProblem, ProblemKind

_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"(\d{1,18})(\.\d{1,9})?([kKmMgGtT])")
_PLAIN_INT = re.compile(r"[+-]?\d{1,18}")
_JSON_HUMAN = re.compile(r'("(?:[^"\\]|\\.)*")|\b(\d+(?:\.\d+)?)([kKmMgGtT])\b')
_MAX_JSON_CHARS = 100_000


class BadValue(Exception):
    """A value that the flag's type cannot hold; the text says what is expected."""


def read_int(text: str, *, human: bool) -> int:
    """A whole number; with `human`, also 32k (thousands) or 32K (1024s)."""
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
    """A number; neither infinite nor not-a-number."""
    try:
        value = float(text)
    except ValueError:
        raise BadValue("a number") from None
    if not math.isfinite(value):
        raise BadValue("a finite number")
    return value


def read_bool(text: str) -> bool:
    """`true` or `false` in any case."""
    lowered = text.strip().lower()
    if lowered not in ("true", "false"):
        raise BadValue("true or false")
    return lowered == "true"


def read_json(text: str) -> Any:
    """JSON, in which a bare 80k counts thousands."""
    if len(text) > _MAX_JSON_CHARS:
        raise BadValue(f"JSON of at most {_MAX_JSON_CHARS:,} characters")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_JSON_HUMAN.sub(_plain_number, text), parse_constant=_refuse_constant)
    except (ValueError, RecursionError, BadValue):
        raise BadValue("JSON like '{\"key\": 1}'") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _plain_number(match: re.Match[str]) -> str:
    return match[0] if match[1] is not None else str(read_int(match[0], human=True))


def read_pairs(text: str) -> dict[str, int]:
    """`image=2,video=1`, the way limits were written until 0.9."""
    pairs: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key:
            raise BadValue("pairs like image=2,video=1")
        pairs[key.strip().lower()] = read_int(value, human=False)
    return pairs


def dotted_value(text: str) -> Any:
    """The value of `--some-config.key VALUE`: JSON, a count, or else a string."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    try:
        return read_int(text, human=True)
    except BadValue:
        return text


def nested(keys: list[str], value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} from ["a", "b"]."""
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` laid over `base`, key by key; lists are joined, as vLLM joins dotted keys."""
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
"""The flags with a field of their own, by vLLM's `dest`, with the field's type."""

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
"""Flags of their own until 0.8.2, keys of --speculative-config since."""
_SHORT_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

NUMBER = re.compile(r"-\d+(\.\d+)?")
_REPEATABLE = {"--middleware"}


def looks_like_flag(token: str) -> bool:
    """Whether a word starts a flag; negative numbers do not."""
    return token.startswith("-") and len(token) > 1 and not NUMBER.fullmatch(token)


@dataclass
class FlagReader:
    """One command line being read for one release."""

    release: Release
    tokens: list[str]
    at: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dotted: dict[str, tuple[Flag, dict[str, Any]]] = field(default_factory=dict)
    problems: list[FlagProblem] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)

    def problem(self, flag: str, kind: ProblemKind, message: str, instead: str = "", value: str = "") -> None:
        """Note what the release would not take."""
        self.problems.append(FlagProblem(flag, kind, message, instead, value))

    def has_value_next(self) -> bool:
        """Whether the next word is a value rather than a flag or the end."""
        return self.at < len(self.tokens) and not looks_like_flag(self.tokens[self.at])

    def take(self) -> str:
        """The next word."""
        self.at += 1
        return self.tokens[self.at - 1]

    def convert_and_store(self, flag: Flag, written: str, text: str) -> None:
        """Read a value as the release does, or note why it cannot."""
        try:
            value = self._convert(flag, text)
        except BadValue as expected:
            self.problem(flag.name, "bad_value", f"{written} takes {expected}, got {text!r}", value=text)
            return
        allowed = choices(flag.name, self.release) if flag.kind in ("str", "int") else None
        if allowed and value is not None and value not in allowed and not self._newer_takes(flag, value):
            listed = ", ".join(str(choice) for choice in allowed if choice is not None)
            message = f"{flag.name} {text} is not among the choices of vLLM {self.release}: {listed}"
            self.problem(flag.name, "bad_choice", message, _nearest_choice(text, allowed), text)
            return
        self.store(flag, value)

    def _newer_takes(self, flag: Flag, value: Any) -> bool:
        """Whether a build between two known releases may take the value because the newer one does."""
        newer = successor(self.release)
        if newer is None or value not in (choices(flag.name, newer) or ()):
            return False
        message = f"{flag.name} {value} came with vLLM {newer}; whether {self.release.asked} takes it is not known"
        self.problem(flag.name, "uncertain", message)
        return True

    def _convert(self, flag: Flag, text: str) -> Any:
        if text == "None" and flag.kind not in ("str", "maybe"):
            return None
        if flag.name == "--max-model-len" and self.release.at_least("0.14.0") and text.strip().lower() == "auto":
            return -1
        if flag.kind in ("int", "human"):
            return read_int(text, human=flag.kind == "human")
        if flag.kind == "float":
            return read_float(text)
        if flag.kind == "pairs" or (flag.name == "--limit-mm-per-prompt" and not text.lstrip().startswith("{")):
            return self._convert_pairs(flag, text)
        return self._convert_json(flag, text) if flag.kind == "json" else text

    def _convert_pairs(self, flag: Flag, text: str) -> dict[str, Any]:
        if text.lstrip().startswith("{"):
            value = read_json(text)
            if not isinstance(value, dict):
                raise BadValue("pairs like image=2,video=1")
            return value
        pairs = read_pairs(text)
        if self.release.at_least("0.10.0"):
            message = f"{flag.name} takes JSON in vLLM {self.release}, got {text!r}"
            self.problem(flag.name, "bad_value", message, f"{flag.name} '{json.dumps(pairs)}'", text)
        return pairs

    def _convert_json(self, flag: Flag, text: str) -> Any:
        value = read_json(text)
        if flag.name == "--compilation-config" and isinstance(value, int) and not isinstance(value, bool):
            if self.release.at_least("0.12.0"):
                message = f"{flag.name} takes JSON since vLLM 0.12.0, got {text!r}"
                self.problem(flag.name, "bad_value", message, f"-O{value}", text)
            return {"level": value}
        if FIELDS.get(flag.dest, "").startswith("Mapping") and not isinstance(value, dict):
            raise BadValue("a JSON object like '{\"key\": 1}'")
        return value

    def store(self, flag: Flag, value: Any) -> None:
        """Keep a value: in its field, in the speculative config, or among the others."""
        if flag.dest in SPECULATIVE_FIELDS or flag.dest in _SHORT_SPECULATIVE:
            key = SPECULATIVE_FIELDS.get(flag.dest) or _SHORT_SPECULATIVE[flag.dest]
            self.values["speculative_config"] = {**(self.values.get("speculative_config") or {}), key: value}
        elif flag.dest == "optimization_level":
            self._store_level(value)
        elif flag.dest in FIELDS:
            self.values[flag.dest] = value
        elif flag.name in _REPEATABLE and flag.name in self.others:
            self.others[flag.name] += (flag.name, str(value))
        elif value is None:
            self.others.pop(flag.name, None)
        else:
            self.others[flag.name] = as_words(value)

    def _store_level(self, value: Any) -> None:
        text = str(value).removeprefix("O")
        if text in ("0", "1", "2", "3"):
            self.values["optimization_level"] = int(text)
        else:
            message = f"--optimization-level takes 0, 1, 2 or 3, got {value!r}"
            self.problem("--optimization-level", "bad_value", message, value=str(value))

    def store_dotted(self) -> None:
        """Dotted keys are gathered into one JSON value that comes last, and so replaces one given whole."""
        for flag, value in self.dotted.values():
            self.store(flag, value)

    def to_args(self, usage: Usage, env: Mapping[str, str]) -> ServeArgs:
        """Everything read, as one value."""
        others: list[str] = []
        table = flags_of(self.release)
        for name, words in self.others.items():
            kind = table[name].kind if name in table else "str"
            if words == ("False",) and kind == "bool":
                others.append("--no-" + name[2:])
            elif len(words) == 1 and (looks_like_flag(words[0]) or kind in ("optbool", "maybe") or not words[0]):
                others.append(f"{name}={words[0]}")
            elif words != ("False",) or kind != "switch":
                others += [name, *words]
        values = {name: value for name, value in self.values.items() if value is not None}
        return ServeArgs(usage=usage, env=dict(env), others=tuple(others), **values)


def _nearest_choice(text: str, allowed: tuple[Any, ...]) -> str:
    import difflib  # only a misspelt value needs it

    numbers = [choice for choice in allowed if isinstance(choice, int)]
    if numbers and text.isdecimal():
        return str(min(numbers, key=lambda choice: abs(choice - int(text))))
    near = difflib.get_close_matches(text, [str(choice) for choice in allowed], n=1)
    return near[0] if near else ""


def as_words(value: Any) -> tuple[str, ...]:
    """A value as command-line words: () for a bare switch."""
    if value is True:
        return ()
    if isinstance(value, tuple | list) and all(isinstance(item, str | int | float) for item in value):
        return tuple(str(item) for item in value)
    if isinstance(value, Mapping | list):
        return (json.dumps(value),)
    return (str(value),)
