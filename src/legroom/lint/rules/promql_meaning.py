"""PromQL over series that exist, which does not mean what it is written for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.facts.metrics import role_of, type_of
from legroom.lint.expressions import NAMES_ONLY, Expression
from legroom.lint.promql import Operand, Token, operands, series_names, skip, tokens
from legroom.lint.rule import Context, LintFinding, Rule, finding

RATE_OF_GAUGE = Rule(
    "promql-rate-of-gauge",
    "error",
    "The rate of a gauge",
    "rate(), irate() and increase() take every fall of a series for a restart of the server. A gauge falls all the "
    "time, so what comes out means nothing.",
)
COUNTER_LEVEL = Rule(
    "promql-counter-level",
    "error",
    "An alert on the level of a counter",
    "A counter only grows until the server restarts: once it is above a number the alert stays on.",
)
NO_LE = Rule(
    "promql-no-le",
    "error",
    "A quantile without its buckets",
    "histogram_quantile() reads the label le. An aggregation that drops it leaves nothing to compute a quantile from.",
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
RULES = (RATE_OF_GAUGE, COUNTER_LEVEL, NO_LE, UNITS, RATIO)
_RATES = ("rate", "irate", "increase")
_OVER_TIME = frozenset(_RATES) | frozenset({
    "delta", "idelta", "deriv", "changes", "resets", "absent", "absent_over_time", "count", "count_over_time",
    "timestamp", "present_over_time", "predict_linear",
})  # fmt: skip
_AGGREGATIONS = ("sum", "avg", "max", "min")
_UNREACHED_S = {"inter_token": 5.0, "ttft": 100.0, "queue_time": 1000.0, "e2e_latency": 1000.0, "prefill_time": 1000.0}
"""Seconds above which no server is still meant: five for one token, a hundred for the first."""
_HIT_RATIO = "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])"
_SHARES = frozenset({"prefix_hits", "prefix_queries"})


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Every query; thresholds only of alerts."""
    if not isinstance(subject, Expression) or subject.owner in (*NAMES_ONLY, "variable"):
        return
    yield from _rates_of_gauges(subject)
    yield from _quantiles(subject)
    if subject.owner == "alert":
        for operand in operands(subject.text):
            yield from _thresholds(subject, operand)


def _rates_of_gauges(subject: Expression) -> Iterator[LintFinding]:
    stream = tokens(subject.text)
    for i, token in enumerate(stream[:-2]):
        if token.text not in _RATES or stream[i + 1].text != "(":
            continue
        series = stream[i + 2]
        if series.kind == "name" and type_of(series.text) == "gauge":
            message = f"{token.text}() of {series.text}, which is a gauge"
            suggestion = f"write deriv({series.text}[...]), avg_over_time({series.text}[...]) or the gauge itself"
            yield finding(RATE_OF_GAUGE, subject.locate(series.offset), message, suggestion, len(series.text))


def _quantiles(subject: Expression) -> Iterator[LintFinding]:
    stream = tokens(subject.text)
    for i, token in enumerate(stream):
        if token.text != "histogram_quantile" or i + 1 >= len(stream) or stream[i + 1].text != "(":
            continue
        inner = stream[i + 2 : skip(stream, i + 1, "(", ")") - 1]
        series = next((name for name in inner if name.text.startswith("vllm:")), None)
        if series is None:
            continue
        if (dropped := _drops_le(inner)) is not None:
            suggestion = f"write {dropped.text} by (le) (...)"
            message = f"{dropped.text} drops the label le of {series.text}, and the quantile is empty"
            yield finding(NO_LE, subject.locate(dropped.offset), message, suggestion, len(dropped.text))


def _drops_le(stream: tuple[Token, ...]) -> Token | None:
    """The aggregation inside a quantile that leaves no le."""
    for i, token in enumerate(stream):
        if token.text not in _AGGREGATIONS or i + 1 >= len(stream):
            continue
        start = i + 1
        if stream[start].text == "(":
            start = skip(stream, start, "(", ")")  # `sum(...) by (le)`
        keyword = stream[start].text.lower() if start < len(stream) else ""
        end = skip(stream, start + 1, "(", ")")
        labels = [label for label in stream[start + 2 : end] if label.kind in ("name", "variable")]
        if any(label.kind == "variable" for label in labels):
            return None
        has_le = any(label.text == "le" for label in labels)
        if (keyword == "by" and not has_le) or (keyword == "without" and has_le) or keyword not in ("by", "without"):
            return token
    return None


def _thresholds(subject: Expression, operand: Operand) -> Iterator[LintFinding]:
    named = [series for series in series_names(operand.text) if type_of(series.name)]
    if not named:
        return
    roles = {role_of(series.name) for series in named}
    kinds = {type_of(series.name) for series in named}
    for comparison in operand.comparisons():
        if comparison.operator in ("==", "!="):
            continue
        place = subject.locate(comparison.offset)
        if roles <= _SHARES and 0 < comparison.number < 1 and not _divides(operand):
            message = f"{named[0].name} counts tokens, and {comparison.number:g} is a share"
            yield finding(RATIO, place, message, f"write {_HIT_RATIO} {comparison.operator} {comparison.number:g}")
        elif (
            kinds == {"counter"}
            and comparison.operator in (">", ">=")
            and not operand.functions & _OVER_TIME
            and not _divides(operand)
        ):
            message = f"{named[0].name} only grows: above {comparison.number:g} it stays until the server restarts"
            yield finding(COUNTER_LEVEL, place, message, f"write increase({named[0].name}[...])")
        elif kinds == {"histogram"} and len(roles) == 1 and not _is_scaled(operand):
            unreached = _UNREACHED_S.get(next(iter(roles)) or "", 0.0)
            if (
                unreached
                and comparison.operator in (">", ">=")
                and comparison.number >= unreached
                and _is_time(operand)
            ):
                message = f"{named[0].name} is in seconds, and {comparison.number:g} are asked for"
                yield finding(UNITS, place, message, f"write {comparison.number / 1000:g}")


def _divides(operand: Operand) -> bool:
    return any(token.text == "/" for token in tokens(operand.text))


def _is_scaled(operand: Operand) -> bool:
    """`* 1000`: the number is in another unit on purpose. A division of a sum by a count leaves the unit."""
    stream = tokens(operand.text)
    return any(
        token.text == "*" or (token.text == "/" and i + 1 < len(stream) and stream[i + 1].kind == "number")
        for i, token in enumerate(stream)
    )


def _is_time(operand: Operand) -> bool:
    """A quantile of buckets, or a sum divided by a count: anything else counts requests."""
    if "histogram_quantile" in operand.functions:
        return True
    names = [series.name for series in series_names(operand.text)]
    return any(name.endswith("_sum") for name in names) and any(name.endswith("_count") for name in names)
