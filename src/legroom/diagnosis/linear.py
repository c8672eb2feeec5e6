"""Patterns that match in linear time whatever the text holds: RE2, behind the few calls that a diagnosis needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import re2

_MEMORY_BYTES = 64 << 20


@cache
def compiled(pattern: str) -> Any:
    """One pattern; its `search`, `finditer` and `sub` are those of `re`."""
    return re2.compile(pattern)


def any_of(texts: Iterable[bytes]) -> Any:
    """One automaton that finds any of many plain texts in bytes."""
    options = re2.Options()
    options.max_mem = _MEMORY_BYTES
    return re2.compile(b"|".join(re2.escape(text) for text in texts) or rb"[^\s\S]", options)


def escaped(text: str) -> str:
    """Plain text as a pattern."""
    return str(re2.escape(text))


class PatternSet:
    """Many patterns tried at once on a text; which of them match comes back."""

    def __init__(self, patterns: Iterable[str]) -> None:
        options = re2.Options()
        options.max_mem = _MEMORY_BYTES
        self._set = re2.Set.SearchSet(options)
        for pattern in patterns:
            self._set.Add(pattern)
        self._set.Compile()

    def matching(self, text: str) -> tuple[int, ...]:
        """Numbers of the patterns that match, smallest first."""
        return tuple(sorted(self._set.Match(text) or ()))
