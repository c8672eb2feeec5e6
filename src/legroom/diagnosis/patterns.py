"""Patterns that match in bounded time whatever the text holds: RE2, behind the few calls that a diagnosis needs.

Without google-re2 (no package index, an unusual platform) the calls run on Python's `re`, slower and with bounded text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Protocol

from legroom.diagnosis.patterns_without_re2 import BoundedPattern, PatternList, TextFinder

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
            import hyperscan  # noqa: PLC0415 - optional, and not worth loading for a small log
        except ImportError:
            pass
        else:
            return HyperscanFinder(marks, hyperscan)
    return Re2Finder(marks) if re2 else TextFinder(marks)
