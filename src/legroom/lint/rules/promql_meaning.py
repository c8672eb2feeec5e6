"""PromQL over existing series whose result means nothing."""

from __future__ import annotations

from legroom.facts.metrics import type_of
from legroom.lint.expressions import NAMES_ONLY, Expression
from legroom.lint.promql_reader import Token, after_bracket, series_names, tokens
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY_RATE_OF_GAUGE = (
    "rate(), irate() and increase() take every fall of a series for a restart of the server. A gauge falls all the "
    "time, so what comes out means nothing."
)
RATE_OF_GAUGE = Rule("promql-rate-of-gauge", "error", "The rate of a gauge", _WHY_RATE_OF_GAUGE)
_WHY_NO_LE = (
    "histogram_quantile() reads the label le. An aggregation that drops it leaves nothing to compute a quantile from."
)
NO_LE = Rule("promql-no-le", "error", "A quantile without its buckets", _WHY_NO_LE)
_RATES = ("rate", "irate", "increase")
_AGGREGATIONS = ("sum", "avg", "max", "min", "count", "stddev", "stdvar", "group")
_COUNTING = frozenset({"count", "count_over_time", "changes", "resets", "present_over_time", "timestamp"})
"""Functions whose result may grow like a counter."""


def _is_query(expression: Expression) -> bool:
    """Whether the expression is a query whose functions are judged: no bare metric name, no dashboard variable."""
    return expression.owner not in (*NAMES_ONLY, "variable")


@checks(Expression, RATE_OF_GAUGE)
def rate_of_gauge(expression: Expression, context: Context) -> Findings:
    """A rate(), increase() or the like of a gauge."""
    stream = tokens(expression.text) if _is_query(expression) else ()
    for i, token in enumerate(stream[:-2]):
        if token.text not in _RATES or stream[i + 1].text != "(":
            continue
        inner = stream[i + 2 : after_bracket(stream, i + 1, "(", ")") - 1]
        if not inner or any(function.text in _COUNTING for function in inner):
            continue
        series = tuple(series_names(expression.text[inner[0].offset : inner[-1].offset + len(inner[-1].text)]))
        if series and all(type_of(each.text) == "gauge" for each in series):
            name = series[0].text
            message = f"{token.text}() of {name}, which is a gauge"
            suggestion = f"write deriv({name}[...]), avg_over_time({name}[...]) or the gauge itself"
            place = expression.locate(inner[0].offset + series[0].offset)
            yield finding(RATE_OF_GAUGE, place, message, suggestion, len(name))


@checks(Expression, NO_LE)
def quantile_without_le(expression: Expression, context: Context) -> Findings:
    """A histogram_quantile() of a vLLM series without buckets, or whose aggregation drops `le`."""
    stream = tokens(expression.text) if _is_query(expression) else ()
    for i, token in enumerate(stream):
        if token.text != "histogram_quantile" or i + 1 >= len(stream) or stream[i + 1].text != "(":
            continue
        inner = stream[i + 2 : after_bracket(stream, i + 1, "(", ")") - 1]
        series = next((name for name in inner if name.text.startswith("vllm:")), None)
        if series is None:
            continue
        place, length = expression.locate(series.offset), len(series.text)
        if (dropped := _aggregation_that_drops_le(inner)) is not None:
            suggestion = f"write {dropped.text} by (le) (...)"
            message = f"{dropped.text} drops the label le of {series.text}, and the quantile is empty"
            # Prometheus can convert histograms to native ones, which have no buckets and no le.
            place, is_certain = expression.locate(dropped.offset), series.text.endswith("_bucket")
            yield finding(NO_LE, place, message, suggestion, len(dropped.text), is_certain=is_certain)
        elif type_of(series.text) and not series.text.endswith("_bucket"):
            family = series.text.removesuffix("_sum").removesuffix("_count")
            has_buckets = type_of(f"{family}_bucket") == "histogram"
            message = f"{series.text} has no label le, and the quantile is empty"
            yield finding(NO_LE, place, message, f"write {family}_bucket" if has_buckets else "", length)
        elif type_of(series.text) and not any(name.text in _RATES for name in inner):
            message = f"{series.text} counts since the start of the server: without rate() it is no quantile of now"
            yield finding(NO_LE, place, message, f"write rate({series.text}[...])", length, is_certain=False)


def _aggregates_buckets(stream: tuple[Token, ...], aggregation: int, after: int) -> bool:
    """Whether the aggregation is over buckets."""
    first = aggregation + 1
    if stream[first].text != "(":  # `sum by (job) (...)`
        first = after_bracket(stream, after + 1, "(", ")") if after + 1 < len(stream) else after
    inner = stream[first : after_bracket(stream, first, "(", ")")] if first < len(stream) else ()
    names = [token.text for token in inner if token.text.startswith("vllm:")]
    return not names or not any(map(type_of, names)) or any(name.endswith("_bucket") for name in names)


def _aggregation_that_drops_le(stream: tuple[Token, ...]) -> Token | None:
    """The aggregation inside a quantile that drops the label le."""
    for i, token in enumerate(stream):
        if token.text not in _AGGREGATIONS or i + 1 >= len(stream):
            continue
        start = i + 1
        if stream[start].text == "(":
            start = after_bracket(stream, start, "(", ")")  # `sum(...) by (le)`
        keyword = stream[start].text.lower() if start < len(stream) else ""
        if not _aggregates_buckets(stream, i, start):
            continue
        end = after_bracket(stream, start + 1, "(", ")")
        labels = [label for label in stream[start + 2 : end] if label.kind in ("name", "variable")]
        if any(label.kind == "variable" for label in labels):
            return None
        has_le = any(label.text == "le" for label in labels)
        if (keyword == "by" and not has_le) or (keyword == "without" and has_le) or keyword not in ("by", "without"):
            return token
    return None
