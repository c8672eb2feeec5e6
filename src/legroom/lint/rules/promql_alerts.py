"""Queries and alerts that compute, compare or wait for something else than meant."""

import re
from dataclasses import replace

from legroom.facts import pattern, read_data
from legroom.facts.metrics import MetricType, releases_of, role_of, type_of
from legroom.lint import promql_reader as promql
from legroom.lint.expressions import COMPARED, NAMES_ONLY, Expression
from legroom.lint.rule import Context, Findings, LintFinding, checks, finding
from legroom.records import dataclass

_RATES = ("rate", "irate", "increase")
_AGGREGATIONS = ("sum", "avg", "max", "min", "count", "stddev", "stdvar", "group")
_COUNTING = frozenset({"count", "count_over_time", "changes", "resets", "present_over_time", "timestamp"})
"""Functions whose result may grow like a counter."""


def _is_query(expression: Expression) -> bool:
    """Whether the expression is a PromQL query to judge, not a bare metric name or a dashboard variable."""
    return expression.owner not in (*NAMES_ONLY, "variable")


@checks(Expression, "promql-rate-of-gauge")
def rate_of_gauge(expression: Expression, context: Context) -> Findings:
    """A rate(), increase() or the like of a gauge."""
    stream = promql.tokens(expression.text) if _is_query(expression) else ()
    for i, token in enumerate(stream[:-2]):
        if token.text not in _RATES or stream[i + 1].text != "(":
            continue
        inner = stream[i + 2 : promql.after_bracket(stream, i + 1, "(", ")") - 1]
        if not inner or any(function.text in _COUNTING for function in inner):
            continue
        series = tuple(promql.series_names(expression.text[inner[0].offset : inner[-1].offset + len(inner[-1].text)]))
        if series and all(type_of(each.text) == "gauge" for each in series):
            name = series[0].text
            message = f"{token.text}() of {name}, which is a gauge"
            suggestion = f"write deriv({name}[...]), avg_over_time({name}[...]) or the gauge itself"
            place = expression.locate(inner[0].offset + series[0].offset)
            yield finding("promql-rate-of-gauge", place, message, suggestion, len(name))


@checks(Expression, "promql-no-le")
def quantile_without_le(expression: Expression, context: Context) -> Findings:
    """A histogram_quantile() of a vLLM series without buckets, or whose aggregation drops `le`."""
    stream = promql.tokens(expression.text) if _is_query(expression) else ()
    for i, token in enumerate(stream):
        if token.text != "histogram_quantile" or i + 1 >= len(stream) or stream[i + 1].text != "(":
            continue
        inner = stream[i + 2 : promql.after_bracket(stream, i + 1, "(", ")") - 1]
        series = next((name for name in inner if name.text.startswith("vllm:")), None)
        if series is None:
            continue
        place, length = expression.locate(series.offset), len(series.text)
        if (dropped := _aggregation_that_drops_le(inner)) is not None:
            suggestion = f"write {dropped.text} by (le) (...)"
            message = f"{dropped.text} drops the label le of {series.text}, and the quantile is empty"
            # Prometheus can convert histograms to native ones, which have no buckets and no le.
            place, is_certain = expression.locate(dropped.offset), series.text.endswith("_bucket")
            yield finding("promql-no-le", place, message, suggestion, len(dropped.text), is_certain=is_certain)
        elif type_of(series.text) and not series.text.endswith("_bucket"):
            family = series.text.removesuffix("_sum").removesuffix("_count")
            has_buckets = type_of(f"{family}_bucket") == "histogram"
            message = f"{series.text} has no label le, and the quantile is empty"
            yield finding("promql-no-le", place, message, f"write {family}_bucket" if has_buckets else "", length)
        elif type_of(series.text) and not any(name.text in _RATES for name in inner):
            message = f"{series.text} counts since the start of the server: without rate() it is no quantile of now"
            yield finding("promql-no-le", place, message, f"write rate({series.text}[...])", length, is_certain=False)


def _aggregates_buckets(stream: tuple[promql.Token, ...], aggregation: int, after: int) -> bool:
    """Whether the aggregation at this index of `stream` is over buckets or unknown series; `after`: index past `by`."""
    first = aggregation + 1
    if stream[first].text != "(":  # `sum by (job) (...)`
        first = promql.after_bracket(stream, after + 1, "(", ")") if after + 1 < len(stream) else after
    inner = stream[first : promql.after_bracket(stream, first, "(", ")")] if first < len(stream) else ()
    names = [token.text for token in inner if token.text.startswith("vllm:")]
    return not names or not any(map(type_of, names)) or any(name.endswith("_bucket") for name in names)


def _aggregation_that_drops_le(stream: tuple[promql.Token, ...]) -> promql.Token | None:
    """The first aggregation over buckets that drops the label `le`; None without one, or if labels are variables."""
    for i, token in enumerate(stream):
        if token.text not in _AGGREGATIONS or i + 1 >= len(stream):
            continue
        start = i + 1
        if stream[start].text == "(":
            start = promql.after_bracket(stream, start, "(", ")")  # `sum(...) by (le)`
        keyword = stream[start].text.lower() if start < len(stream) else ""
        if not _aggregates_buckets(stream, i, start):
            continue
        end = promql.after_bracket(stream, start + 1, "(", ")")
        labels = [label for label in stream[start + 2 : end] if label.kind in ("name", "variable")]
        if any(label.kind == "variable" for label in labels):
            return None
        has_le = any(label.text == "le" for label in labels)
        if (keyword == "by" and not has_le) or (keyword == "without" and has_le) or keyword not in ("by", "without"):
            return token
    return None


_UNREACHED_S = {"inter_token": 5.0, "ttft": 100.0}
"""Latencies in seconds that no usable server has; a whole request may take up to 1000 s."""
_MINUTES = (60, 120, 180, 240, 300, 480, 600, 900, 1200, 1500, 1800, 2400, 2700, 3000, 3600, 5400, 7200)
"""Whole minutes: a threshold that was written in seconds on purpose."""
_DIVIDED_BY = read_data("lint_rules.json")["divided_by"]
_SHARE_OF = {"vllm:spec_decode_num_accepted_tokens_total": "spec_accepted"}
_UP = (">", ">=")


@dataclass(frozen=True)
class _Compared:
    """A PromQL operand, its known series, and the number it is compared with."""

    operand: promql.Operand
    comparison: promql.Comparison
    named: tuple[promql.Token, ...]
    is_alone: bool
    """Whether it is the only condition: beside another operand, `counter > 0` asks whether there ever was one."""

    @property
    def first_series(self) -> str:
        """The name of the first of the compared series."""
        return self.named[0].text

    @property
    def kinds(self) -> set[MetricType | None]:
        """The Prometheus types of the compared series; None stands for a series of unknown type."""
        return {type_of(series.text) for series in self.named}

    @property
    def roles(self) -> set[str]:
        """What the compared series measure (`kv_use` ...); an empty text stands for a series without a role."""
        return {_SHARE_OF.get(series.text) or role_of(series.text) or "" for series in self.named}

    @property
    def divides(self) -> bool:
        """Whether the compared expression holds a division."""
        return any(token.text == "/" for token in promql.tokens(self.operand.text))

    @property
    def subtracts(self) -> bool:
        """Whether a difference is compared, such as `x - x offset 5m`: unlike a counter it also falls."""
        return any(token.text == "-" for token in promql.tokens(self.operand.text))

    @property
    def is_over_time(self) -> bool:
        """Whether a function over time, such as rate(), is applied, so that it is not a current value."""
        return bool(self.operand.functions & promql.NO_LEVEL)


_OF_ITSELF = pattern("promql_alerts.of_itself")


@checks(Expression, "promql-ratio")
def rate_divided_by_itself(expression: Expression, context: Context) -> Findings:
    """A rate divided by the rate of the same series without sum(): PromQL pairs equal labels, so the ratio is 1."""
    for found in _OF_ITSELF.finditer(expression.text) if _is_query(expression) else ():
        message = f"PromQL pairs equal labels: each {found['name']} is divided by itself, which is 1"
        yield finding("promql-ratio", expression.locate(found.start("name")), message, "write sum() on both sides")


@checks(Expression, "promql-counter-level", "promql-units", "promql-ratio")
def wrong_thresholds(expression: Expression, context: Context) -> Findings:
    """Thresholds on a counter's value instead of its rate, in the wrong unit, or a ratio where tokens are counted."""
    sides = list(promql.operands(expression.text)) if expression.owner in COMPARED else []
    for operand in sides:
        named = tuple(series for series in promql.series_names(operand.text) if type_of(series.text))
        for comparison in operand.comparisons() if named else ():
            if comparison.operator not in ("==", "!="):
                yield from _wrong_threshold(expression, _Compared(operand, comparison, named, is_alone=len(sides) == 1))


def _wrong_threshold(expression: Expression, compared: _Compared) -> Findings:
    """A finding or none on one comparison: a token rate with a share, a counter's value, or a wrong unit."""
    if compared.roles <= set(_DIVIDED_BY) and not compared.divides and 0 < _as_share(compared) < 1:
        if compared.is_alone or compared.comparison.operator not in _UP:  # otherwise it asks whether there is traffic
            yield _percent_finding(expression, compared)
    elif not compared.is_over_time and compared.kinds <= {"counter", "histogram"} and _compares_counter_value(compared):
        yield _counter_level_finding(expression, compared)
    elif compared.kinds == {"histogram"} and len(compared.roles) == 1 and "_seconds" in compared.first_series:
        yield from _unit_findings(expression, compared)


def _as_share(compared: _Compared) -> float:
    """The threshold as a share from 0 to 1: divided by 100 where the expression is multiplied by 100."""
    return compared.comparison.number / (100 if _scale_factor(compared.operand) == 100 else 1)


def _percent_finding(expression: Expression, compared: _Compared) -> LintFinding:
    """The finding where a token rate is compared with a share, such as 0.9 or 90 %."""
    number, operator = compared.comparison.number, compared.comparison.operator
    name = compared.first_series
    of = f"vllm:{_DIVIDED_BY[min(compared.roles)]}_total"
    hits = "vllm:prefix_cache_hits_total" if "prefix_queries" in compared.roles else name
    share = f"rate({hits}[5m]) / rate({of}[5m])"
    message = f"{name} counts tokens, and {number:g}{'' if number < 1 else ' %'} is a share"
    suggestion = f"write {share} {operator} {_as_share(compared):g}"
    return finding("promql-ratio", expression.locate(compared.comparison.offset), message, suggestion)


def _compares_counter_value(compared: _Compared) -> bool:
    """Whether counters, or a histogram's sums and counts, are compared by value: no quantile, no difference."""
    if "histogram_quantile" in compared.operand.functions or compared.subtracts:
        return False
    if not compared.is_alone and (compared.comparison.number == 0 or compared.kinds == {"histogram"}):
        return False
    return all(
        type_of(series.text) == "counter" or series.text.endswith(("_sum", "_count")) for series in compared.named
    )


def _counter_level_finding(expression: Expression, compared: _Compared) -> LintFinding:
    """The finding where a counter's ever-growing value is compared instead of its rate."""
    number, name = compared.comparison.number, compared.first_series
    place = expression.locate(compared.comparison.offset)
    suggestion = f"write increase({name}[...])"
    if compared.divides:
        message = f"{name} counts since the start of the server: without rate() the quotient hardly moves any more"
        return finding("promql-counter-level", place, message, f"write rate({name}[...])", is_certain=False)
    if expression.owner == "scaler":
        message = f"{name} only grows, so replicas are added and never taken away"
        return finding("promql-counter-level", place, message, f"write rate({name}[...])")
    if compared.comparison.operator in _UP:
        message = f"{name} only grows: above {number:g} it stays until the server restarts"
        return finding("promql-counter-level", place, message, suggestion)
    message = f"{name} only grows: it is below {number:g} after a start and never again"
    return finding("promql-counter-level", place, message, suggestion, is_certain=False)


def _unit_findings(expression: Expression, compared: _Compared) -> Findings:
    """A duration in seconds compared with milliseconds, or the reverse."""
    comparison, factor = compared.comparison, _scale_factor(compared.operand)
    if comparison.operator not in _UP or not _is_duration(compared.operand):
        return
    place, name, role = expression.locate(comparison.offset), compared.first_series, min(compared.roles)
    if factor == 1000 and comparison.number < 1:
        message = f"{name} is made milliseconds, and is always above {comparison.number:g} of them"
        yield finding("promql-units", place, message, f"write {comparison.number * 1000:g}, or leave out the * 1000")
    elif factor == 1 and comparison.number >= _UNREACHED_S.get(role, 500.0):  # 500 is often meant as milliseconds
        message = f"{name} is in seconds, and {comparison.number:g} are asked for"
        is_certain = comparison.number >= _UNREACHED_S.get(role, 1000.0) and comparison.number not in _MINUTES
        yield finding("promql-units", place, message, f"write {comparison.number / 1000:g}", is_certain=is_certain)


def _scale_factor(operand: promql.Operand) -> float:
    """The number that the series are multiplied by, else 1; 0 where there are several, or a division by a number."""
    stream = promql.tokens(operand.text)
    factor = 1.0
    for i, token in enumerate(stream):
        before, after = stream[i - 1] if i else None, stream[i + 1] if i + 1 < len(stream) else None
        if token.text == "*":
            numbers = [promql.number_of_token(side) for side in (before, after) if side and side.kind == "number"]
            factor = numbers[0] if numbers and factor == 1 else 0.0
        elif token.text == "/" and after and after.kind == "number":
            factor = 0.0
    return factor


def _is_duration(operand: promql.Operand) -> bool:
    """Whether the expression is a duration: a quantile, or a sum divided by a count."""
    if "histogram_quantile" in operand.functions:
        return True
    names = [series.text for series in promql.series_names(operand.text)]
    return any(name.endswith("_sum") for name in names) and any(name.endswith("_count") for name in names)


_LOAD = frozenset({"running", "waiting"})
_PRESSURE = frozenset({"waiting", "preemptions", "queue_time", "swapped", "ttft", "e2e_latency", "inter_token"})
_PRESSURE |= {"prompt_tokens_recomputed"}
_PROGRESS = frozenset({"request_success", "generation_tokens", "prompt_tokens"})
_NOT_PROGRESS = frozenset({"absent", "absent_over_time", "count", "resets", "time", "timestamp"})
"""Functions over a progress counter whose result says nothing about progress."""
_NEARLY_FULL = 0.9


def _only_while(alert: Expression, series: str) -> str:
    """Advice to add `and on (...) SERIES > 0` to an alert, with the labels that the alert's expression keeps."""
    kept = re.search(r"\bby\s*\(([^)]*)\)", alert.text)
    labels = kept[1] if kept else "instance"
    return f"add `and on ({labels}) {f'sum by ({labels}) ({series})' if kept else series} > 0`"


@checks(Expression, "alert-full-pool")
def alert_on_full_pool(alert: Expression, context: Context) -> Findings:
    """An alert that fires on a full KV cache alone, without asking for waiting or preempted requests."""
    if alert.owner != "alert" or promql.roles_in_recorded(alert.text, context) & _PRESSURE:
        return
    levels = (operand for operand in promql.operands(alert.text) if not operand.functions & promql.NO_LEVEL)
    firing = [each for each in levels if "kv_use" in promql.roles_in(each.text, context) and _fires_above_level(each)]
    if firing:
        message = (
            f"{_lead(alert)}fires on a full KV cache, which is healthy while nothing waits and nothing is preempted"
        )
        suggestion = f"{_only_while(alert, 'vllm:num_requests_waiting')}, or take legroom export prometheus"
        found = finding("alert-full-pool", alert.locate(0), message, suggestion)
        limits = [each.number for operand in firing for each in operand.comparisons() if not each.scaled]
        is_early = bool(limits) and max(limits) < _NEARLY_FULL  # it may be meant as a sign of load
        yield replace(found, severity="note") if is_early else found


def _lead(alert: Expression) -> str:
    """The alert's name and a space, as the beginning of a message; empty where it has no name."""
    return f"{alert.name} " if alert.name else ""


def _fires_above_level(operand: promql.Operand) -> bool:
    """Whether a KV-use operand is compared with `>` or `>=`; not a sum above 1, which counts many servers' pools."""
    adds_up = "sum" in operand.functions
    return any(
        comparison.operator in (">", ">=") and not (adds_up and comparison.number > 1 and not comparison.scaled)
        for comparison in operand.comparisons()
    )


@checks(Expression, "alert-never")
def alert_that_never_fires(expression: Expression, context: Context) -> Findings:
    """A threshold that KV cache use or running requests never exceed."""
    for operand in promql.operands(expression.text) if expression.owner in COMPARED else ():
        if not operand.functions & (promql.NO_LEVEL | {"sum", "sum_over_time"}):
            yield from _threshold_out_of_range(expression, operand, context)


def _threshold_out_of_range(expression: Expression, operand: promql.Operand, context: Context) -> Findings:
    """KV cache use compared with more than 1, or running requests with --max-num-seqs of the plan or more."""
    used = promql.roles_in(operand.text, context)
    for comparison in operand.comparisons():
        if comparison.operator not in (">", ">=") or comparison.scaled:
            continue
        place = expression.locate(comparison.offset)
        if used == {"kv_use"} and comparison.number > 1:
            message = f"the KV cache's use is a ratio: it is never above 1, and {comparison.number:g} is asked for"
            suggestion = f"write {comparison.number / 100:g}" if comparison.number <= 100 else ""
            names = [series.text for series in promql.series_names(operand.text) if series.text.startswith("vllm")]
            # An exporter that exposes the use under another name may expose it in percent.
            yield finding("alert-never", place, message, suggestion, is_certain=all(map(releases_of, names)))
        elif used == {"running"} and context.plan is not None:
            limit = int(context.plan.args["max_num_seqs"])
            if comparison.number >= limit:
                message = f"the plan lets at most {limit} requests run (--max-num-seqs), so this never fires"
                yield finding("alert-never", place, message, f"write a number below {limit}")


@checks(Expression, "alert-no-traffic")
def alert_without_traffic(alert: Expression, context: Context) -> Findings:
    """An alert on `rate(success) == 0` that does not ask for running requests, so that an idle server fires it."""
    if alert.owner != "alert" or promql.roles_in_recorded(alert.text, context) & _LOAD:
        return
    progress = [
        operand for operand in promql.operands(alert.text) if promql.roles_in(operand.text, context) & _PROGRESS
    ]
    compared = [comparison for operand in progress for comparison in operand.comparisons()]
    if any(comparison.operator in (">", "!=") and comparison.number >= 0 for comparison in compared):
        return  # another counter must move, so there is traffic
    silent = [operand for operand in progress if not operand.functions & _NOT_PROGRESS]
    compared = [comparison for operand in silent for comparison in operand.comparisons()]
    if any(comparison.number == 0 and comparison.operator in ("==", "<=") for comparison in compared):
        suggestion = _only_while(alert, "vllm:num_requests_running")
        yield finding(
            "alert-no-traffic", alert.locate(0), f"{_lead(alert)}fires whenever no requests come in", suggestion
        )
