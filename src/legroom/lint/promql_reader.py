"""The series of a PromQL expression and what they are compared with; a tokenizer rather than a parser, because
dashboards hold variables (`$__rate_interval`, `[[job]]`)."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, takewhile

from legroom.facts.metrics import nearest, role_of
from legroom.lint.rule import Context
from legroom.records import dataclass

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>\#[^\n]*)
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)
    |(?P<variable>\$\{[^}]*\}|\$__?\w+|\$\w+|\[\[\w+\]\])
    |(?P<duration>(?:\d+(?:ms|[smhdwy]))+\b)
    |(?P<number>(?:0x[0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(?![\w:]))
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<operator>==|!=|>=|<=|=~|!~|[-+*/%^<>=(){}\[\],@:])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = GROUPING | frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "atan2", "start", "end"})
_SET_OPERATORS = ("and", "or", "unless")
_PLAIN = re.compile(r"[\w:]+")
_COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})
_REVERSED = {">": "<", "<": ">", ">=": "<=", "<=": ">="}
_ARITHMETIC = frozenset("*/+-%^")
_BEFORE_TERM = ("(", *_SET_OPERATORS, ")")


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    offset: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`expression OP number` with the offset of the number; `number OP expression` is reversed."""

    operator: str
    number: float
    offset: int
    scaled: bool
    """Whether the series are changed by arithmetic before the comparison."""


def tokens(expression: str) -> tuple[Token, ...]:
    """The tokens of a PromQL expression, without spaces and comments."""
    return tuple(
        Token(str(match.lastgroup), match[0], match.start())
        for match in _TOKEN.finditer(expression)
        if match.lastgroup not in ("space", "comment")
    )


def series_names(expression: str) -> Iterator[Token]:
    """The name tokens of all series in an expression, in order, also those of `{__name__="..."}`."""
    stream = tokens(expression)
    i = 0
    while i < len(stream):
        token = stream[i]
        following = stream[i + 1].text if i + 1 < len(stream) else ""
        if token.text == "{":
            yield from _names_in_label_matchers(stream, i)
            i = after_bracket(stream, i, "{", "}")
        elif token.text == "[":
            i = after_bracket(stream, i, "[", "]")
        elif token.kind == "name" and token.text.lower() in GROUPING and following == "(":
            i = after_bracket(stream, i + 1, "(", ")")
        else:
            after = stream[i + 2].text if i + 2 < len(stream) else ""  # `sum by (x) (...)`
            called = following == "(" or (following.lower() in ("by", "without") and after == "(")
            if token.kind == "name" and not called and token.text.lower() not in _WORDS:
                yield token
            i += 1


def _names_in_label_matchers(stream: tuple[Token, ...], start: int) -> Iterator[Token]:
    """Series names in the braces at `start`: `{__name__="x"}`, `{__name__=~"x"}` or `{"x", ...}` (Prometheus 3)."""
    inner = stream[start : after_bracket(stream, start, "{", "}")]
    for i, token in enumerate(inner):
        if token.kind != "string" or i == 0:
            continue
        name = token.text[1:-1]
        if inner[i - 1].text == "=~":
            name = name.removeprefix("^").removesuffix("$")
        is_one_name = inner[i - 1].text == "=" or (inner[i - 1].text == "=~" and _PLAIN.fullmatch(name))
        by_label = i > 1 and inner[i - 2].text == "__name__" and is_one_name
        followed = inner[i + 1].text if i + 1 < len(inner) else ""
        if by_label or (inner[i - 1].text in ("{", ",") and followed in (",", "}")):
            yield Token("name", name, token.offset + token.text.index(name))


def after_bracket(stream: tuple[Token, ...], i: int, opening: str, closing: str) -> int:
    """The index after the `closing` bracket of the `opening` one at index `i`; the stream's end where none does."""
    depth = 0
    while i < len(stream):
        depth += (stream[i].text == opening) - (stream[i].text == closing)
        i += 1
        if depth == 0:
            break
    return i


def comparisons(expression: str) -> Iterator[Comparison]:
    """Each comparison of an expression with a number, as `expression OP number`, on whichever side the number is."""
    stream = tokens(expression)
    scaled = False
    for i, token in enumerate(stream):
        if token.text in _SET_OPERATORS:
            scaled = False
        scaled = scaled or token.text in _ARITHMETIC
        if token.kind != "operator" or token.text not in _COMPARISONS:
            continue
        right = stream[i + 2 :] if stream[i + 1 : i + 2] and stream[i + 1].text.lower() == "bool" else stream[i + 1 :]
        if right and right[0].kind == "number" and not (right[1:] and right[1].text in _ARITHMETIC):
            yield Comparison(token.text, number_of_token(right[0]), right[0].offset, scaled)
        elif i and stream[i - 1].kind == "number" and (i == 1 or stream[i - 2].text in _BEFORE_TERM):
            number = stream[i - 1]
            texts = (token.text for token in stream[i + 1 :])
            operator, until_set = (
                _REVERSED.get(token.text, token.text),
                takewhile(lambda text: text not in _SET_OPERATORS, texts),
            )
            yield Comparison(
                operator, number_of_token(number), number.offset, any(text in _ARITHMETIC for text in until_set)
            )


def number_of_token(token: Token) -> float:
    """The number of a token, also hexadecimal."""
    return float(int(token.text, 0)) if token.text.lower().startswith("0x") else float(token.text)


NO_LEVEL = frozenset(
    {"absent", "absent_over_time", "changes", "count", "count_over_time", "count_values", "delta", "deriv", "group"}
    | {"idelta", "increase", "irate", "predict_linear", "present_over_time", "rate", "resets", "stddev"}
    | {"stddev_over_time", "stdvar", "stdvar_over_time", "time", "timestamp"}
)
"""Functions whose result is not in the unit of their series."""


def roles_in(expression: str, context: Context) -> set[str]:
    """The roles (`kv_use` ...) of vLLM's series in an expression, of the nearest if misspelled; the name if no role."""
    roles: set[str] = set()
    for series in series_names(expression):
        role = role_of(series.text)
        if role is None and series.text.startswith("vllm"):
            instead = nearest(series.text, context.release)
            role = role_of(instead) if instead else None
        if role is not None or series.text.startswith("vllm"):
            roles.add(role or series.text)
    return roles


def roles_in_recorded(expression: str, context: Context) -> set[str]:
    """The roles of vLLM's series in an expression and in the linted recording rules that it refers to."""
    pending = [expression]
    seen: set[str] = set()
    roles: set[str] = set()
    while pending:
        text = pending.pop()
        roles |= roles_in(text, context)
        for series in series_names(text):
            if series.text in context.records and series.text not in seen:
                seen.add(series.text)
                pending.append(context.records[series.text])
    return roles


_DEPTH = {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}


@dataclass(frozen=True)
class Operand:
    """One side of a PromQL set operator (and, or, unless), or the whole expression where there is none."""

    text: str
    offset: int
    functions: frozenset[str]
    """The functions and aggregations that it calls."""

    def comparisons(self) -> Iterator[Comparison]:
        """This operand's comparisons with a number; offsets are those in the whole expression."""
        for comparison in comparisons(self.text):
            yield replace(comparison, offset=comparison.offset + self.offset)


def operands(expression: str) -> Iterator[Operand]:
    """The sides of all set operators (and, or, unless) of an expression, from left to right."""
    pending = [tokens(expression)]
    while pending:
        stream = _without_parentheses(pending.pop())
        pieces, first, depth = [], 0, 0
        for i, token in enumerate(stream):
            depth += _DEPTH.get(token.text, 0)
            if depth == 0 and token.kind == "name" and token.text.lower() in _SET_OPERATORS:
                pieces.append(stream[first:i])
                first = i + 1
        pieces = [*pieces, stream[first:]]
        if len(pieces) > 1:
            pending += reversed(pieces)
        elif stream:
            start, end = stream[0].offset, stream[-1].offset + len(stream[-1].text)
            yield Operand(expression[start:end], start, frozenset(_functions(stream)))


def _without_parentheses(stream: tuple[Token, ...]) -> tuple[Token, ...]:
    """The tokens without a leading `on (...)` and without surrounding parentheses."""
    while len(stream) > 1:
        if stream[0].text.lower() in GROUPING and stream[1].text == "(":
            stream = stream[after_bracket(stream, 1, "(", ")") :]
        elif stream[0].text == "(" and stream[-1].text == ")" and after_bracket(stream, 0, "(", ")") == len(stream):
            stream = stream[1:-1]
        else:
            break
    return stream


def _functions(stream: tuple[Token, ...]) -> Iterator[str]:
    """The functions and aggregations in an expression, in lower case: words before a bracket, `by` or `without`."""
    for token, following in pairwise(stream):
        if token.kind == "name" and (following.text == "(" or following.text.lower() in ("by", "without")):
            yield token.text.lower()
