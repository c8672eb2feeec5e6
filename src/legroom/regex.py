"""Regular expressions for untrusted text: RE2, whose time is linear in the length of the text.

Pyodide has no RE2, so the browser uses `re`, with the ASCII meaning of `\\d`, `\\w`, `\\s` and `\\b` that RE2 has.
"""

import heapq
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

try:
    import re2
except ImportError:
    re2 = None

_MAX_MEMORY_BYTES = 64 << 20
"""Memory of one automaton. With RE2's default of 8 MiB a log of 50 MiB takes 11 s instead of 1.2 s."""


@cache
def compiled(pattern: str) -> Any:
    """The pattern compiled by RE2, or by `re` where RE2 is missing; both have the methods of `re`."""
    return re2.compile(pattern) if re2 else re.compile(pattern, re.ASCII)


def escaped(text: str) -> str:
    """A plain text as a pattern that matches it literally."""
    return str(re2.escape(text)) if re2 else re.escape(text)


def pattern_error(pattern: str) -> str | None:
    """The error of an invalid pattern; None for a valid one."""
    errors: tuple[type[Exception], ...] = (re2.error, re.error) if re2 else (re.error,)
    try:
        _ = re2.compile(pattern, _re2_options()) if re2 else re.compile(pattern)
    except errors as error:
        return str(error)
    return None


_SET_PATTERNS = 25
"""Patterns of one automaton. On 178 texts of 2 kB that share little, 395 patterns in sixteen automata of 16 MiB take
3 ms a text where one of 64 MiB, which is full again and again, takes 15 ms."""
_SET_MEMORY_BYTES = 16 << 20


class PatternSet:
    """Many patterns matched against a text, some at a time."""

    def __init__(self, patterns: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        """Each pattern with plain texts, one of which every match of it contains."""
        self._patterns = tuple(patterns)
        self._sets: list[Any] = []
        for first in range(0, len(self._patterns), _SET_PATTERNS) if re2 else ():
            some = re2.Set.SearchSet(_re2_options(_SET_MEMORY_BYTES))
            for pattern, _ in self._patterns[first : first + _SET_PATTERNS]:
                some.Add(pattern)
            some.Compile()
            self._sets.append(some)

    def matching(self, text: str) -> tuple[int, ...]:
        """Indexes of the patterns that match anywhere in the text, in ascending order."""
        if self._sets:
            found = (sorted(some.Match(text) or ()) for some in self._sets)
            return tuple(part * _SET_PATTERNS + index for part, indices in enumerate(found) for index in indices)
        return tuple(
            index
            for index, (pattern, contained) in enumerate(self._patterns)
            if any(part in text for part in contained) and compiled(pattern).search(text)
        )


class LiteralFinder:
    """Finds any of many plain texts in a buffer of bytes."""

    def __init__(self, literals: tuple[bytes, ...]) -> None:
        self._literals = literals
        alternatives = b"|".join(re2.escape(literal) for literal in literals) if re2 else b""
        self._pattern = re2.compile(alternatives or rb"[^\s\S]", _re2_options()) if re2 else None

    def find(self, buffer: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """(Offset, literal found there) of the finder's literals in buffer[start:end], in ascending order."""
        if self._pattern is None:
            yield from heapq.merge(*(_occurrences(buffer, literal, start, end) for literal in self._literals))
            return
        position = start
        while position < end and (match := self._pattern.search(buffer, position, end)):
            yield match.start(), match.group()
            position = match.end()


def _occurrences(buffer: bytes, literal: bytes, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(Offset, `literal`) of each occurrence in buffer[start:end], not overlapping."""
    while (start := buffer.find(literal, start, end)) >= 0:
        yield start, literal
        start += len(literal)


def _re2_options(memory_bytes: int = _MAX_MEMORY_BYTES) -> Any:
    """RE2's options with `memory_bytes` for one automaton; None where RE2 is missing."""
    if re2 is None:
        return None
    options = re2.Options()
    options.max_mem = memory_bytes
    options.log_errors = False
    return options
