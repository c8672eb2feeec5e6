"""Shell text as simple commands whose words know where they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from legroom.exports.lint.shell_scan import OPERATORS, Word, logical_lines
from legroom.exports.lint.text import Text
from legroom.vllm.shell import ASSIGNMENT, expand

_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_BARE_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PLACEHOLDERS = ("...", "…")


@dataclass(frozen=True)
class Command:
    """One simple command with the environment it sees."""

    words: tuple[Word, ...]
    env: Mapping[str, Word] = field(default_factory=dict)
    """What was exported before it or stands in front of it."""
    pipeline: str = ""
    """The raw line it stands in."""
    end: int = 0

    def texts(self) -> tuple[str, ...]:
        """The words alone."""
        return tuple(word.text for word in self.words)


def commands(source: Text) -> Iterator[Command]:
    """Every simple command, variables replaced where the text itself sets them."""
    state = _State({}, {}, {})
    for line in logical_lines(source.text):
        for words in _split_commands(line):
            yield from _take(words, line, state)


@dataclass
class _State:
    values: dict[str, Word]
    exported: dict[str, Word]
    arrays: dict[str, list[Word]]


def _take(words: list[Word], line: list[Word], state: _State) -> Iterator[Command]:
    raw = " ".join(word.raw for word in line)
    if words and (found := re.fullmatch(r"(\w+)\+?=\(", words[0].text)):
        inner = [word for word in words[1:] if word.text != ")"]
        state.arrays[found[1]] = state.arrays.get(found[1], []) + inner if "+=" in words[0].text else inner
        return
    words = list(_expanded(words, state))
    while words and words[0].text in ("then", "do", "else", "if", "while", "until", "!", "{", "time"):
        words = words[1:]
    count = 0
    while count < len(words) and ASSIGNMENT.fullmatch(words[count].text):
        count += 1
    own, rest = words[:count], words[count:]
    exports = bool(rest) and rest[0].text in ("export", "declare", "readonly", "local", "typeset")
    if not rest or exports:
        for word in (*own, *rest[1:]):
            _assign(word, state, exported=exports)
        return
    env = {**state.exported, **{name: value for word in own for name, value in [_assignment(word)]}}
    yield Command(tuple(rest), env, raw, rest[-1].offset)


def _assignment(word: Word) -> tuple[str, Word]:
    name, _, value = word.text.partition("=")
    return name, Word(value, word.offset, word.raw)


def _assign(word: Word, state: _State, *, exported: bool) -> None:
    if ASSIGNMENT.fullmatch(word.text):
        name, value = _assignment(word)
        state.values[name] = value
        if exported or name in state.exported:
            state.exported[name] = value
    elif exported and word.text in state.values:
        state.exported[word.text] = state.values[word.text]


def _expanded(words: list[Word], state: _State) -> Iterator[Word]:
    texts = {name: value.text for name, value in state.values.items()}
    for word in words:
        if word.text in _PLACEHOLDERS:
            continue
        array = _ARRAY.fullmatch(word.text)
        if array and array[1] in state.arrays:
            for inner in state.arrays[array[1]]:
                yield inner.with_text(expand(inner.text, texts))
            continue
        bare = _BARE_VARIABLE.fullmatch(word.raw)
        value = state.values.get(bare[1] or bare[2]) if bare else None
        splits = value is not None and any(character.isspace() for character in value.text)
        if value is not None and splits and "$(" not in value.text and "`" not in value.text:
            yield from (Word(part, value.offset, part) for part in _parts(value.text))
        elif word.raw.startswith("'"):
            yield word
        else:
            yield word.with_text(expand(word.text, texts))


def _parts(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _split_commands(line: list[Word]) -> Iterator[list[Word]]:
    """Cut at operators; redirections and their targets are left out."""
    current: list[Word] = []
    skip = in_array = False
    for word in line:
        if in_array:
            current.append(word)
            in_array = word.raw != ")"
            continue
        if skip:
            skip = False
        elif word.raw and set(word.raw) <= set(OPERATORS):
            if "<" in word.raw or ">" in word.raw:
                if current and current[-1].raw.isdigit():
                    current.pop()
                skip = not word.raw.endswith("&") or word.raw == ">&"
            elif current:
                yield current
                current = []
        else:
            current.append(word)
            in_array = word.raw.endswith("=(")
    if current:
        yield current
