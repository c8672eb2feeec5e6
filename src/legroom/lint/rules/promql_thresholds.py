"""Numbers that alerts and autoscalers compare vLLM's series with, and that mean something else than they look like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.facts.metrics import MetricType, role_of, type_of
from legroom.lint.expressions import COMPARED, Expression
from legroom.lint.promql import Comparison, Operand, Series, operands, series_names, tokens
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding
from legroom.records import dataclass

COUNTER_LEVEL = Rule(
    "promql-counter-level",
    "error",
    "An alert on the level of a counter",
    "A counter only grows until the server restarts: once it is above a number the alert stays on.",
)
UNITS = Rule(
    "promql-units",
    "error",
    "Seconds compared with milliseconds",
    "vLLM's times are in seconds: a threshold in milliseconds is a thousand times too high, and is never reached.",
)
RATIO = Rule(
    "promql-ratio",
    "error",
    "A counter compared with a share",
    "Prefix-cache hits were a ratio from 0 to 1 once, and are counters of tokens now: hits have to be divided by "
    "queries, each as a rate.",
)
RULES = (COUNTER_LEVEL, UNITS, RATIO)
_OVER_TIME = frozenset(
    {
        "rate",
        "irate",
        "increase",
        "delta",
        "idelta",
        "deriv",
        "changes",
        "resets",
        "absent",
        "absent_over_time",
        "count",
        "count_over_time",
        "timestamp",
        "present_over_time",
        "predict_linear",
    }
)
_UNREACHED_S = {"inter_token": 5.0, "ttft": 100.0}
_UNREACHED_OTHER_S = 1000.0
"""Seconds above which no server is still meant: five for one token, a hundred for the first."""
_UNLIKELY_OTHER_S = 500.0
"""A whole request may take so long, and 500 is what people write who think of milliseconds."""
_MINUTES = (60, 120, 180, 240, 300, 480, 600, 900, 1200, 1500, 1800, 2400, 2700, 3000, 3600, 5400, 7200)
"""Whole minutes, as people write who do think of seconds."""
_SHORTEST_MS = 1.0
"""No first token, and no answer, takes less."""
_DIVIDED_BY = {
    "prefix_hits": "prefix_cache_queries",
    "prefix_queries": "prefix_cache_queries",
    "spec_accepted": "spec_decode_num_draft_tokens",
}
_SHARE_OF = {"vllm:spec_decode_num_accepted_tokens_total": "spec_accepted"}
_UP = (">", ">=")


@dataclass(frozen=True)
class _Compared:
    """One operand whose series are all known, against one number."""

    operand: Operand
    comparison: Comparison
    named: tuple[Series, ...]
    is_alone: bool
    """Whether nothing else has to be so: beside another operand, `counter > 0` asks whether there ever was one."""

    @property
    def first(self) -> str:
        return self.named[0].name

    @property
    def kinds(self) -> set[MetricType | None]:
        return {type_of(series.name) for series in self.named}

    @property
    def roles(self) -> set[str]:
        return {_SHARE_OF.get(series.name) or role_of(series.name) or "" for series in self.named}

    @property
    def divides(self) -> bool:
        return any(token.text == "/" for token in tokens(self.operand.text))

    @property
    def subtracts(self) -> bool:
        """`x - x offset 5m`, or what came in less what went out: such a difference falls again."""
        return any(token.text == "-" for token in tokens(self.operand.text))

    @property
    def is_over_time(self) -> bool:
        return bool(self.operand.functions & _OVER_TIME)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Every comparison with a number in what fires or scales."""
    if not isinstance(subject, Expression) or subject.owner not in COMPARED:
        return
    sides = list(operands(subject.text))
    for operand in sides:
        named = tuple(series for series in series_names(operand.text) if type_of(series.name))
        for comparison in operand.comparisons() if named else ():
            if comparison.operator not in ("==", "!="):
                yield from _judge(subject, _Compared(operand, comparison, named, is_alone=len(sides) == 1))


def _judge(subject: Expression, compared: _Compared) -> Iterator[LintFinding]:
    if compared.roles <= set(_DIVIDED_BY) and not compared.divides and 0 < _as_share(compared) < 1:
        if compared.is_alone or compared.comparison.operator not in _UP:  # else it asks whether there is any traffic
            yield _ratio(subject, compared)
    elif not compared.is_over_time and compared.kinds <= {"counter", "histogram"} and _is_level(compared):
        yield _counter_level(subject, compared)
    elif compared.kinds == {"histogram"} and len(compared.roles) == 1 and "_seconds" in compared.first:
        yield from _units(subject, compared)


def _as_share(compared: _Compared) -> float:
    """The number as a part of one, also where the other side is multiplied by 100."""
    return compared.comparison.number / (100 if _factor(compared.operand) == 100 else 1)


def _ratio(subject: Expression, compared: _Compared) -> LintFinding:
    number, operator = compared.comparison.number, compared.comparison.operator
    name = compared.first
    of = f"vllm:{_DIVIDED_BY[min(compared.roles)]}_total"
    hits = "vllm:prefix_cache_hits_total" if "prefix_queries" in compared.roles else name
    share = f"rate({hits}[5m]) / rate({of}[5m])"
    message = f"{name} counts tokens, and {number:g}{'' if number < 1 else ' %'} is a share"
    suggestion = f"write {share} {operator} {_as_share(compared):g}"
    return finding(RATIO, subject.locate(compared.comparison.offset), message, suggestion)


def _is_level(compared: _Compared) -> bool:
    """The value of counters themselves; a quantile of all buckets since the start is judged with the quantiles."""
    if "histogram_quantile" in compared.operand.functions or compared.subtracts:
        return False
    if not compared.is_alone and (compared.comparison.number == 0 or compared.kinds == {"histogram"}):
        return False
    return all(
        type_of(series.name) == "counter" or series.name.endswith(("_sum", "_count")) for series in compared.named
    )


def _counter_level(subject: Expression, compared: _Compared) -> LintFinding:
    number, name = compared.comparison.number, compared.first
    place = subject.locate(compared.comparison.offset)
    suggestion = f"write increase({name}[...])"
    if compared.divides:
        message = f"{name} counts since the start of the server: without rate() the quotient hardly moves any more"
        return finding(COUNTER_LEVEL, place, message, f"write rate({name}[...])", severity="warning")
    if subject.owner == "scaler":
        message = f"{name} only grows, so replicas are added and never taken away"
        return finding(COUNTER_LEVEL, place, message, f"write rate({name}[...])")
    if compared.comparison.operator in _UP:
        message = f"{name} only grows: above {number:g} it stays until the server restarts"
        return finding(COUNTER_LEVEL, place, message, suggestion)
    message = f"{name} only grows: it is below {number:g} after a start and never again"
    return finding(COUNTER_LEVEL, place, message, suggestion, severity="warning")


def _units(subject: Expression, compared: _Compared) -> Iterator[LintFinding]:
    comparison, factor = compared.comparison, _factor(compared.operand)
    if comparison.operator not in _UP or not _is_time(compared.operand):
        return
    place, name, role = subject.locate(comparison.offset), compared.first, min(compared.roles)
    if factor == 1000 and comparison.number < _SHORTEST_MS:
        message = f"{name} is made milliseconds, and is always above {comparison.number:g} of them"
        yield finding(UNITS, place, message, f"write {comparison.number * 1000:g}, or leave out the * 1000")
    elif factor == 1:
        unreached = _UNREACHED_S.get(role, _UNREACHED_OTHER_S)
        unlikely = _UNREACHED_S.get(role, _UNLIKELY_OTHER_S)
        if comparison.number >= unlikely:
            message = f"{name} is in seconds, and {comparison.number:g} are asked for"
            is_sure = comparison.number >= unreached and comparison.number not in _MINUTES
            severity: Severity | None = None if is_sure else "warning"
            yield finding(UNITS, place, message, f"write {comparison.number / 1000:g}", severity=severity)


def _factor(operand: Operand) -> float:
    """What the series are multiplied by; 0 where it is more than one plain number.

    A division of a sum by a count leaves the unit.
    """
    stream = tokens(operand.text)
    factor = 1.0
    for i, token in enumerate(stream):
        before, after = stream[i - 1] if i else None, stream[i + 1] if i + 1 < len(stream) else None
        if token.text == "*":
            numbers = [float(side.text) for side in (before, after) if side and side.kind == "number"]
            factor = numbers[0] if numbers and factor == 1 else 0.0
        elif token.text == "/" and after and after.kind == "number":
            factor = 0.0
    return factor


def _is_time(operand: Operand) -> bool:
    """A quantile of buckets, or a sum divided by a count: anything else counts requests."""
    if "histogram_quantile" in operand.functions:
        return True
    names = [series.name for series in series_names(operand.text)]
    return any(name.endswith("_sum") for name in names) and any(name.endswith("_count") for name in names)
