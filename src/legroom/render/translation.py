"""Sentences in Chinese: templates with named gaps, in `facts/data/sentences_zh.json`, matched to the English text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.diagnosis_texts import Language

_GAP = re.compile(r"\{(\w+)\}")
_BREAKS = re.compile(r"(?<=[.;:]) |(?<=,) ")
"""Where a text without a template of its own is taken apart."""


def in_language(value: Any, language: Language, only: Collection[str] = ()) -> Any:
    """A text, or every text in lists and dictionaries (of dictionaries below the keys `only`), in that language.

    A text without a template stays English.
    """
    if language == "en":
        return value
    if isinstance(value, dict):
        return {name: in_language(inner, language, () if name in only else only) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_language(inner, language, only) for inner in value]
    return _in_chinese(value) if isinstance(value, str) and not only else value


@cache
def _templates() -> Sequence[tuple[re.Pattern[str], str]]:
    """The pattern of each English template and its Chinese text, those with the most words of their own first."""
    texts = sorted(read_data("sentences_zh.json")["sentences"].items(), key=lambda pair: -len(_GAP.sub("", pair[0])))
    return [(_pattern(english), chinese) for english, chinese in texts]


def _pattern(english: str) -> re.Pattern[str]:
    """A template as a regular expression; each gap is a group."""
    pieces = _GAP.split(english)
    named = (re.escape(piece) if number % 2 == 0 else f"(?P<{piece}>.+?)" for number, piece in enumerate(pieces))
    return re.compile("".join(named), re.DOTALL)


@lru_cache(maxsize=4096)
def _in_chinese(text: str) -> str:
    """The Chinese text of the first template that matches, its gaps translated too; else that of its parts."""
    for pattern, chinese in _templates():
        if match := pattern.fullmatch(text):
            return _GAP.sub(lambda gap: _in_chinese(match[gap[1]]), chinese)
    parts = _BREAKS.split(text)
    return " ".join(map(_in_chinese, parts)) if len(parts) > 1 else text
