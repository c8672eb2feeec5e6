"""What a text says was tried in vain: settings with their values, switches, variables, releases."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from legroom.diagnosis.pasted_command import plain_lines
from legroom.diagnosis.told_settings import mentions, setting_words
from legroom.facts import read_data

_BESIDE_CHARS = 60
"""The outcome of a trial that is a sentence of its own, `Same error.`, begins within so many characters."""


@cache
def _words(name: str) -> re.Pattern[str]:
    """The pattern `name` of `evidence.json` for how people tell of a trial and of its outcome."""
    return re.compile(read_data("evidence.json")["attempts"][name])


def attempts_in_vain(text: str) -> Iterator[Mapping[str, Any]]:
    """Setting -> value, or `tried NAME` -> `lower`, `raise` or empty, of each trial that by the text did not help."""
    plain = "\n".join(plain_lines(text.split("\n")))
    sentences = [sentence for sentence in setting_words("sentence").split(plain) if sentence.strip()]
    is_list = False
    for sentence, following in zip(sentences, (*sentences[1:], ""), strict=False):
        is_item = bool(_words("item").match(sentence))
        is_list = (is_list and is_item) or bool(_words("list").search(sentence))
        outcome = _words("vain").sub("", sentence)
        is_vain = outcome != sentence or bool(_words("vain").search(following[:_BESIDE_CHARS]))
        is_vain = (is_vain and bool(_words("trying").search(sentence))) or (is_list and is_item)
        if is_vain and not _words("cured").search(outcome):
            yield from _tried_settings(sentence.rstrip(" .!"))


def _tried_settings(sentence: str) -> Iterator[Mapping[str, Any]]:
    """One mapping for each value, switch, variable, release or bare name of a setting in a trial's sentence."""
    valued = set()
    for mention in mentions(sentence):
        values = mention.values[-1:] if mention.is_change else mention.values
        more = _words("more").match(sentence, mention.end) if not mention.is_change else None
        others = re.findall(r"\d+(?:\.\d+)?", more[0]) if more else ()
        numbers = (float(other) if "." in other else int(other) for other in others)
        yield from ({mention.name: value} for value in (*values, *numbers))
        valued.add(mention.name)
    for match in _words("switch").finditer(sentence):
        yield from ({name: True} for name, found in match.groupdict().items() if found)
    yield from ({name: value} for name, value in _words("variable").findall(sentence))
    yield from ({"tried release": one or other} for one, other in _words("release").findall(sentence))
    for match in _words("bare").finditer(sentence):
        name = "gpu_memory_utilization" if match["share"] else re.sub("[ -]", "_", match["name"].lower())
        if name not in valued:
            yield {f"tried {name}": (match["down"] and "lower") or (match["up"] and "raise") or ""}
