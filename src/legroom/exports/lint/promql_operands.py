"""The operands of `and`, `or` and `unless`: each has its own series, functions and thresholds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from legroom.exports.lint.promql_words import GROUPING, Comparison, Token, comparisons, skip, tokens
from legroom.records import dataclass

_SET_OPERATORS = ("and", "or", "unless")
_DEPTH = {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}


@dataclass(frozen=True)
class Operand:
    """One side of a set operator, or the whole expression where there is none."""

    text: str
    offset: int
    functions: frozenset[str]
    """Everything it calls, aggregations among them."""

    def comparisons(self) -> Iterator[Comparison]:
        """With a number; offsets are those of the expression."""
        for one in comparisons(self.text):
            yield replace(one, offset=one.offset + self.offset)


def operands(expression: str) -> Iterator[Operand]:
    """Every operand, in order."""
    waiting = [tokens(expression)]
    while waiting:
        stream = _bare(waiting.pop())
        pieces = _pieces(stream)
        if len(pieces) > 1:
            waiting += reversed(pieces)
        elif stream:
            start, end = stream[0].offset, stream[-1].offset + len(stream[-1].text)
            yield Operand(expression[start:end], start, frozenset(_called(stream)))


def _bare(stream: tuple[Token, ...]) -> tuple[Token, ...]:
    """Without `on (...)` in front of it and brackets around it."""
    while len(stream) > 1:
        if stream[0].text.lower() in GROUPING and stream[1].text == "(":
            stream = stream[skip(stream, 1, "(", ")") :]
        elif stream[0].text == "(" and stream[-1].text == ")" and skip(stream, 0, "(", ")") == len(stream):
            stream = stream[1:-1]
        else:
            break
    return stream


def _pieces(stream: tuple[Token, ...]) -> list[tuple[Token, ...]]:
    pieces, first, depth = [], 0, 0
    for i, token in enumerate(stream):
        depth += _DEPTH.get(token.text, 0)
        if depth == 0 and token.kind == "name" and token.text.lower() in _SET_OPERATORS:
            pieces.append(stream[first:i])
            first = i + 1
    return [*pieces, stream[first:]]


def _called(stream: tuple[Token, ...]) -> Iterator[str]:
    for token, following in pairwise(stream):
        if token.kind == "name" and (following.text == "(" or following.text.lower() in ("by", "without")):
            yield token.text.lower()
