"""Documents that show what not to do: the text above a block says that it is old or wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

GONE = re.compile(
    r"deprecat|remov|renam|replac|previous|former|legacy|no longer|obsolete|instead of|used to|superse|older|migrat",
    re.IGNORECASE,
)
"""Words by which a text says that a name is one of the past."""
_WRONG = re.compile(
    r"\b(wrong|incorrect|broken|invalid|fails|bad|avoid|don't|never|(do|does) not|doesn't|old|before)\b|❌|✗|🚫",
    re.IGNORECASE,
)
_FENCE = re.compile(r"\s*(>\s*)?(`{3,}|~{3,})")
_MOST_BLOCK_LINES = 80
_LINES_ABOVE = 3
"""A heading and a sentence: what belongs to a block is told right above it."""


def is_counterexample(lines: Sequence[str], row: int) -> bool:
    """Whether the block that a line of a document stands in is told to be old or wrong."""
    first = row
    while first > 0 and row - first < _MOST_BLOCK_LINES and not _FENCE.match(lines[first]):
        first -= 1
    if not _FENCE.match(lines[first]):
        return False
    comments = [line for line in lines[first + 1 : row] if line.lstrip().startswith("#")]
    above = [line for line in lines[:first] if line.strip()][-_LINES_ABOVE:]
    while any(_FENCE.match(line) for line in above):
        above = above[1:]  # another block, with words of its own
    return any(GONE.search(line) or _WRONG.search(line) for line in (*above, *comments[-1:]))
