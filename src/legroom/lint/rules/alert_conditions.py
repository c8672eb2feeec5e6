"""Alerts that fire on a healthy server, or never."""

from __future__ import annotations

from legroom.facts.metrics import releases_of
from legroom.lint.expressions import COMPARED, Expression
from legroom.lint.promql_reader import NO_LEVEL, Operand, operands, roles_in, roles_in_recorded, series_names
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY_FULL_POOL = (
    "A full pool is the healthy state of a busy server: blocks of finished requests stay until somebody needs them. "
    "Pressure is a full pool while requests wait or are preempted (LR403)."
)
FULL_POOL = Rule("alert-full-pool", "warning", "An alert on a full KV cache alone", _WHY_FULL_POOL)
_WHY_NEVER = "The use of the KV cache is a ratio from 0 to 1, and no more requests run than --max-num-seqs allows."
NEVER = Rule("alert-never", "error", "A threshold that cannot be reached", _WHY_NEVER)
_WHY_NO_TRAFFIC = (
    "No request in five minutes is a quiet night, not a fault. No progress while requests run is one (LR908)."
)
NO_TRAFFIC = Rule("alert-no-traffic", "warning", "An alert on silence", _WHY_NO_TRAFFIC)
_LOAD = frozenset({"running", "waiting"})
_PRESSURE = frozenset({"waiting", "preemptions", "queue_time", "swapped", "ttft", "e2e_latency", "inter_token"})
_PRESSURE |= {"prompt_tokens_recomputed"}
_PROGRESS = frozenset({"request_success", "generation_tokens", "prompt_tokens"})
_NOT_PROGRESS = frozenset({"absent", "absent_over_time", "count", "resets", "time", "timestamp"})
"""Functions over a progress counter whose result says nothing about progress."""


@checks(Expression, FULL_POOL)
def alert_on_full_pool(alert: Expression, context: Context) -> Findings:
    """An alert that fires on a full KV cache alone, without asking for waiting or preempted requests."""
    if alert.owner != "alert" or roles_in_recorded(alert.text, context) & _PRESSURE:
        return
    levels = (operand for operand in operands(alert.text) if not operand.functions & NO_LEVEL)
    if any("kv_use" in roles_in(operand.text, context) and _fires_above_level(operand) for operand in levels):
        healthy = "which is healthy while nothing waits and nothing is preempted"
        suggestion = "add `and on (instance) vllm:num_requests_waiting > 0`, or take legroom export prometheus"
        yield finding(FULL_POOL, alert.locate(0), f"{_lead(alert)}fires on a full KV cache, {healthy}", suggestion)


def _lead(alert: Expression) -> str:
    """The alert's name and a space, to start a message with; empty where it has no name."""
    return f"{alert.name} " if alert.name else ""


def _fires_above_level(operand: Operand) -> bool:
    """Whether the operand is a KV use above a level; a sum above 1 counts the pools of many servers instead."""
    adds_up = "sum" in operand.functions
    return any(
        comparison.operator in (">", ">=") and not (adds_up and comparison.number > 1 and not comparison.scaled)
        for comparison in operand.comparisons()
    )


@checks(Expression, NEVER)
def alert_that_never_fires(expression: Expression, context: Context) -> Findings:
    """A threshold that KV cache use or running requests never exceed."""
    for operand in operands(expression.text) if expression.owner in COMPARED else ():
        if not operand.functions & (NO_LEVEL | {"sum", "sum_over_time"}):
            yield from _threshold_out_of_range(expression, operand, context)


def _threshold_out_of_range(expression: Expression, operand: Operand, context: Context) -> Findings:
    """KV cache use compared with more than 1, or running requests with --max-num-seqs of the plan or more."""
    used = roles_in(operand.text, context)
    for comparison in operand.comparisons():
        if comparison.operator not in (">", ">=") or comparison.scaled:
            continue
        place = expression.locate(comparison.offset)
        if used == {"kv_use"} and comparison.number > 1:
            message = f"the KV cache's use is a ratio: it is never above 1, and {comparison.number:g} is asked for"
            suggestion = f"write {comparison.number / 100:g}" if comparison.number <= 100 else ""
            names = [series.text for series in series_names(operand.text) if series.text.startswith("vllm")]
            # An exporter that exposes the use under another name may expose it in percent.
            yield finding(NEVER, place, message, suggestion, is_certain=all(map(releases_of, names)))
        elif used == {"running"} and context.plan is not None:
            limit = int(context.plan.args["max_num_seqs"])
            if comparison.number >= limit:
                message = f"the plan lets at most {limit} requests run (--max-num-seqs), so this never fires"
                yield finding(NEVER, place, message, f"write a number below {limit}")


@checks(Expression, NO_TRAFFIC)
def alert_without_traffic(alert: Expression, context: Context) -> Findings:
    """An alert on `rate(success) == 0` that does not ask for running requests, so that an idle server fires it."""
    if alert.owner != "alert" or roles_in_recorded(alert.text, context) & _LOAD:
        return
    progress = [operand for operand in operands(alert.text) if roles_in(operand.text, context) & _PROGRESS]
    compared = [comparison for operand in progress for comparison in operand.comparisons()]
    if any(comparison.operator in (">", "!=") and comparison.number >= 0 for comparison in compared):
        return  # another counter must move, so there is traffic
    silent = [operand for operand in progress if not operand.functions & _NOT_PROGRESS]
    compared = [comparison for operand in silent for comparison in operand.comparisons()]
    if any(comparison.number == 0 and comparison.operator in ("==", "<=") for comparison in compared):
        suggestion = "add `and on (instance) vllm:num_requests_running > 0`"
        yield finding(NO_TRAFFIC, alert.locate(0), f"{_lead(alert)}fires whenever no requests come in", suggestion)
