"""A user's own command line with some flags changed, and everything else left exactly as it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from legroom.facts.flags import Flag, flag_kind_ever, flags_of
from legroom.facts.releases import Release
from legroom.vllm.command import flag_words
from legroom.vllm.reading import looks_like_flag

_SWITCHES = ("switch", "bool", "optbool")


def with_flags(words: Sequence[str], flags_at: int, changes: Mapping[str, Any], release: Release) -> tuple[str, ...]:
    """The words with every flag of `changes` (by vLLM's Python names) set, or taken away where the value is None."""
    table = flags_of(release)
    by_dest = {flag.dest: flag for flag in table.values()}
    kept = list(words[:flags_at])
    at = flags_at
    while at < len(words):
        length = _length(words, at, table)
        if _dest(words[at], table) not in changes:
            kept += words[at : at + length]
        at += length
    for dest, value in changes.items():
        if value is not None:
            kept += flag_words(by_dest.get(dest) or Flag(_name(dest), dest, "str"), value)
    return tuple(kept)


def value_of(words: Sequence[str], flags_at: int, dest: str, release: Release) -> str | None:
    """What a command says for one flag, as it was written; "" for a switch, None where it does not stand there."""
    table = flags_of(release)
    found: str | None = None
    at = flags_at
    while at < len(words):
        length = _length(words, at, table)
        if _dest(words[at], table) == dest:
            found = words[at].partition("=")[2] or " ".join(words[at + 1 : at + length])
        at += length
    return found


def _name(dest: str) -> str:
    return dest if dest.startswith("-") else "--" + dest.replace("_", "-")


def _flag(word: str, table: Mapping[str, Flag]) -> Flag | None:
    """The flag that a word starts, as argparse would find it."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        name = "--" + name[2:].partition(".")[0].replace("_", "-")
        if name not in table and name.startswith("--no-") and "--" + name[5:] in table:
            name = "--" + name[5:]
        if name not in table and len(name) > 3:
            near = {flag.name for long, flag in table.items() if long.startswith(name)}
            name = near.pop() if len(near) == 1 else name
    return table.get(name)


def _dest(word: str, table: Mapping[str, Flag]) -> str | None:
    if not looks_like_flag(word):
        return None
    flag = _flag(word, table)
    return flag.dest if flag else word.partition("=")[0].lstrip("-").replace("-", "_")


def _length(words: Sequence[str], at: int, table: Mapping[str, Flag]) -> int:
    """How many words the flag (or bare word) at a place takes."""
    word = words[at]
    if not looks_like_flag(word) or "=" in word or word.startswith("-O"):
        return 1
    flag = _flag(word, table)
    kind = flag.kind if flag else flag_kind_ever("--" + word.lstrip("-").replace("_", "-"))
    if kind in ("switch", "bool"):
        return 1
    end = at + 1
    most = len(words) if kind and kind.startswith("list:") else at + 2
    while end < min(most, len(words)) and not looks_like_flag(words[end]):
        end += 1
    if kind == "optbool" and end > at + 1 and words[at + 1].lower() not in ("true", "false", "0", "1"):
        return 1
    return end - at
