"""Sentences in Chinese: templates with named gaps, in `facts/data/sentences_zh.json`, matched to the English text."""

import re
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.diagnosis_texts import Language

_GAP = re.compile(r"\{(\w+)\}")
_INSIDE_A_SENTENCE = r"(?:(?![.!?] [^a-z]).)+?"
_INSIDE_A_CLAUSE = r"(?:(?![.!?] [^a-z]|[;:] ).)+?"
"""What fills a gap: nothing that spans two sentences, and where a template begins with it, nor two clauses."""
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[^a-z])")
_ENGLISH_WORD = re.compile(r"(?<![\w./-])[a-z]{3,}(?![\w./-])")  # A word that is no part of a name, a path or a flag.
_SPACE_IN_CHINESE = re.compile(r"(?<=[\u3001-\uff5e]) (?=[\u3001-\uff5e])")
_CLAUSE_ENDS = [re.compile(f"(?<={mark}) ") for mark in (";", ":", ",")]


def in_language(value: Any, language: Language, only: Collection[str] = ()) -> Any:
    """The value with its texts translated where possible; with `only`, of dicts just the texts below these keys."""
    if language == "en":
        return value
    if isinstance(value, dict):
        return {name: in_language(inner, language, () if name in only else only) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_language(inner, language, only) for inner in value]
    return _in_chinese(value) if isinstance(value, str) and not only else value


@cache
def _templates() -> Sequence[tuple[re.Pattern[str], str]]:
    """(pattern of an English template, its Chinese text), those with the most text outside their gaps first."""
    texts = sorted(read_data("sentences_zh.json")["sentences"].items(), key=lambda pair: -len(_GAP.sub("", pair[0])))
    return [(_template_pattern(english), chinese) for english, chinese in texts]


def _template_pattern(english: str) -> re.Pattern[str]:
    """The regular expression of an English template; each gap is a named group."""
    literal, *rest = _GAP.split(english)
    named = [re.escape(literal)]
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        named.append(f"(?P<{name}>{_INSIDE_A_SENTENCE if ''.join(named) else _INSIDE_A_CLAUSE}){re.escape(text)}")
    return re.compile("".join(named), re.DOTALL)


@lru_cache(maxsize=4096)
def _in_chinese(text: str) -> str:
    """The text by the first template that matches, its gaps translated too; else sentence by sentence, or by clauses if
    each has a template. A gap spans two clauses only where they cannot be translated alone."""
    spanning = ""
    for pattern, chinese in _templates():
        if match := pattern.fullmatch(text):
            filled = _SPACE_IN_CHINESE.sub("", _GAP.sub(lambda gap: _in_chinese(match[gap[1]]), chinese))
            if not any(mark in gap for gap in match.groups() for mark in ("; ", ", ")):
                return filled
            spanning = spanning or filled
    if not spanning and len(sentences := _SENTENCE_END.split(text)) > 1:
        return " ".join(map(_in_chinese, sentences)).replace("。 ", "。")
    for mark in _CLAUSE_ENDS:
        parts = [part.rstrip(";:,") for part in mark.split(text)]
        if len(parts) > 1 and all(_in_chinese(part) != part or not _ENGLISH_WORD.search(part) for part in parts):
            return {";": "；", ":": "：", ",": "，"}[mark.pattern[4]].join(map(_in_chinese, parts))
    return spanning or text
