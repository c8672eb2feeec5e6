"""The same calls as RE2's on Python's `re`, for a machine where google-re2 cannot be installed.

`re` backtracks, so time is bounded in two ways: a pattern that could take exponential time (one unbounded repetition
inside another, with no character in between that only the outer one takes) is refused, and no stretch of text longer
than `MOST_CHARS` is searched at once. RE2 reads `\\d`, `\\w`, `\\s` and `\\b` as ASCII, so `re` is told to.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MOST_CHARS, _CHARS_BEFORE = 4_000, 1_000
_PIECE = re.compile(rf"(?s).{{1,{MOST_CHARS}}}(?:(?<![\s=:])(?=\s)|$)|.{{1,{MOST_CHARS}}}")
"""Text in pieces that end before a space, but not between a name and the secret that is assigned to it."""
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


class BoundedPattern:
    """One pattern with the calls of `re` that a diagnosis uses."""

    def __init__(self, pattern: str) -> None:
        tree = _parser.parse(pattern, re.ASCII)
        if _is_explosive(tree):
            raise ValueError(f"without google-re2 this pattern could take exponential time: {pattern}")
        self._pattern = re.compile(pattern, re.ASCII)
        self._required = tuple(text.lower() for text in _required_texts(tree))

    def search(self, text: str) -> re.Match[str] | None:
        """The first match; in a long text only around the words that a match must hold."""
        for start in self._starts(text):
            match = self._pattern.search(text, start, start + MOST_CHARS)
            if match:
                return match
        return None

    def _starts(self, text: str) -> Iterable[int]:
        if not self._required:
            return (0,)
        lowered = text.lower()  # a pattern, or a part of one, may ignore case
        places = [at for required in self._required if (at := lowered.find(required)) >= 0]
        return (0,) if places and len(text) <= MOST_CHARS else sorted(max(at - _CHARS_BEFORE, 0) for at in places)

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        return self._pattern.finditer(text[:MOST_CHARS])

    def sub(self, replacement: str, text: str) -> str:
        if len(text) <= MOST_CHARS:
            return self._pattern.sub(replacement, text)
        return "".join(self._pattern.sub(replacement, piece) for piece in _PIECE.findall(text))


class PatternList:
    """Many patterns tried one after the other on a text."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [BoundedPattern(pattern) for pattern in patterns]

    def matching(self, text: str) -> tuple[int, ...]:
        return tuple(index for index, pattern in enumerate(self._patterns) if pattern.search(text))


class TextFinder:
    """Many plain texts in a buffer: each is searched for by itself, and the next hit of all of them is given."""

    def __init__(self, marks: tuple[bytes, ...]) -> None:
        self._marks = marks

    def find(self, buffer: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        hits = [(at, mark) for mark in self._marks if (at := buffer.find(mark, start, end)) >= 0]
        heapq.heapify(hits)
        while hits:
            at, mark = hits[0]
            yield at, mark
            following = buffer.find(mark, at + len(mark), end)
            if following >= 0:
                heapq.heapreplace(hits, (following, mark))
            else:
                heapq.heappop(hits)


def _is_explosive(tree: Any) -> bool:
    """Whether an unbounded repetition holds another one with nothing between two rounds that tells where one ends."""
    for operation, argument in tree:
        parts = _parts(operation, argument)
        if operation in _REPEATS and argument[1] is _constants.MAXREPEAT:
            inner = list(_unbounded_inside(argument[2]))
            ends = [chr(value) for kind, value in argument[2] if kind is _constants.LITERAL]
            if inner and not any(all(body.search(end) is None for body in inner) for end in ends):
                return True
        if any(_is_explosive(part) for part in parts):
            return True
    return False


def _unbounded_inside(tree: Any) -> Iterator[re.Pattern[str]]:
    for operation, argument in tree:
        if operation in _REPEATS and argument[1] is _constants.MAXREPEAT:
            yield _compiler.compile(argument[2], re.ASCII | re.DOTALL)
        for part in _parts(operation, argument):
            yield from _unbounded_inside(part)


def _parts(operation: Any, argument: Any) -> list[Any]:
    """The patterns inside a repetition, a group or an alternation."""
    if operation in _REPEATS:
        return [argument[2]]
    if operation is _constants.SUBPATTERN:
        return [argument[3]]
    return list(argument[1]) if operation is _constants.BRANCH else []


def _required_texts(tree: Any) -> tuple[str, ...]:
    """Plain texts of which every match holds at least one: most lines are ruled out by looking for them."""
    runs = [""]
    branches: tuple[str, ...] = ()
    for operation, argument in tree:
        if operation is _constants.LITERAL:
            runs[-1] += chr(argument)
            continue
        runs.append("")
        if operation in (_constants.BRANCH, _constants.SUBPATTERN):
            texts = [_required_texts(part) for part in _parts(operation, argument)]
            if all(texts) and not branches:
                branches = tuple(text for part in texts for text in part)
    longest = max(runs, key=len)
    return branches if branches and len(longest) < min(map(len, branches)) else (longest,) if longest else branches
