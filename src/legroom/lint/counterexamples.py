"""Files that show what not to do: documents that say that a block is old or wrong, and the inputs of tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

GONE = re.compile(
    r"deprecat|remov|renam|replac|previous|former|legacy|no longer|obsolete|instead of|used to|superse|older|migrat",
    re.IGNORECASE,
)
"""Words by which a text says that a name is one of the past."""
_WRONG = re.compile(
    r"\b(wrong|incorrect|broken|invalid|fails|bad|avoid|don't|never|(do|does) not|doesn't|old|before)\b|❌|✗|🚫",
    re.IGNORECASE,
)
_FAILS = re.compile(r"unrecognized argument|\berror\b|\bfail", re.IGNORECASE)
_TEST_CODE = re.compile(r"(^|/)(tests?/.*|test_[^/]*|[^/]*_test|conftest)\.py$|(^|/)(fixtures|testdata)/")
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
    if any(GONE.search(line) or _WRONG.search(line) for line in (*above, *comments[-1:])):
        return True
    return any(_FAILS.search(line) for line in _below(lines, row))


def _below(lines: Sequence[str], row: int) -> Iterator[str]:
    """The rest of the block, and the line after it: what comes of the command."""
    last = row + 1
    while last < len(lines) and last - row < _MOST_BLOCK_LINES and not _FENCE.match(lines[last]):
        yield lines[last]
        last += 1
    yield from [line for line in lines[last + 1 :] if line.strip()][:1]


def is_test_code(path: str) -> bool:
    """Whether commands in a file are what a test is given, right or wrong."""
    return _TEST_CODE.search(path) is not None
