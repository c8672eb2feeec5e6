"""Patterns that match in bounded time whatever the text holds: RE2, behind the few calls that a diagnosis needs.

Without google-re2 (no package index, an unusual platform) the calls run on Python's `re`, slower. That one backtracks,
so time is bounded in two ways: a pattern that could take exponential time (one unbounded repetition inside another,
with no character in between that only the outer one takes) is refused, and no stretch of text longer than `MOST_CHARS`
is searched at once. RE2 reads `\\d`, `\\w`, `\\s` and `\\b` as ASCII, so `re` is told to.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from functools import cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Protocol

try:
    import re2
except ImportError:
    re2 = None

_MEMORY_BYTES = 64 << 20


@cache
def compiled(pattern: str) -> Any:
    """One pattern; its `search`, `finditer` and `sub` are those of `re`."""
    return re2.compile(pattern) if re2 else BoundedPattern(pattern)


def any_of(texts: Iterable[bytes]) -> Any:
    """One automaton that finds any of many plain texts in bytes."""
    options = re2.Options()
    options.max_mem = _MEMORY_BYTES
    return re2.compile(b"|".join(re2.escape(text) for text in texts) or rb"[^\s\S]", options)


def escaped(text: str) -> str:
    """Plain text as a pattern."""
    return str(re2.escape(text)) if re2 else re.escape(text)


class PatternMatcher(Protocol):
    """Many patterns, to be tried on a text."""

    def matching(self, text: str) -> tuple[int, ...]:
        """Numbers of the patterns that match, smallest first."""


def pattern_set(patterns: Iterable[str]) -> PatternMatcher:
    return PatternSet(patterns) if re2 else PatternList(patterns)


class PatternSet:
    """All patterns at once, by RE2."""

    def __init__(self, patterns: Iterable[str]) -> None:
        options = re2.Options()
        options.max_mem = _MEMORY_BYTES
        self._set = re2.Set.SearchSet(options)
        for pattern in patterns:
            self._set.Add(pattern)
        self._set.Compile()

    def matching(self, text: str) -> tuple[int, ...]:
        return tuple(sorted(self._set.Match(text) or ()))


MOST_MATCHES = 20_000
"""A buffer with more than this is given back in parts, so that a text that is everywhere can be dropped in between."""


class Finder(Protocol):
    def find(self, buffer: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Where texts begin, and which, in order; the caller may stop at any time and start again further on."""


class Re2Finder:
    def __init__(self, marks: tuple[bytes, ...]) -> None:
        self._automaton = any_of(marks)

    def find(self, buffer: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        position = start
        while position < end:
            match = self._automaton.search(buffer, position, end)
            if not match:
                return
            yield match.start(), match.group()
            position = match.end()


class HyperscanFinder:
    def __init__(self, marks: tuple[bytes, ...], hyperscan: Any) -> None:
        self._marks = marks
        self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        self._database.compile(
            expressions=[b"".join(b"\\x%02x" % byte for byte in mark) for mark in marks],
            ids=list(range(len(marks))),
            flags=[0] * len(marks),
        )
        self._error = hyperscan.error

    def find(self, buffer: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """All matches of a stretch at once; of a stretch with too many, those up to where it was left."""
        position = start
        while position < end:
            hits: list[tuple[int, bytes]] = []
            stopped = self._scan(memoryview(buffer)[position:end], hits)
            for offset, mark in hits:
                yield position + offset, mark
            if not stopped or not hits:
                return
            position += hits[-1][0] + 1

    def _scan(self, view: memoryview, hits: list[tuple[int, bytes]]) -> bool:
        marks, append = self._marks, hits.append

        def on_match(index: int, _from: int, to: int, _flags: int, _context: object) -> bool | None:
            mark = marks[index]
            append((to - len(mark), mark))
            return True if len(hits) >= MOST_MATCHES else None

        try:
            self._database.scan(view, match_event_handler=on_match)
        except self._error:
            if len(hits) < MOST_MATCHES:
                raise
            return True
        return len(hits) >= MOST_MATCHES


def make_finder(marks: tuple[bytes, ...], large: bool) -> Finder:
    """The fastest finder there is for this much text."""
    if large:
        try:
            import hyperscan  # optional, and not worth loading for a small log
        except ImportError:
            pass
        else:
            return HyperscanFinder(marks, hyperscan)
    return Re2Finder(marks) if re2 else TextFinder(marks)


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
