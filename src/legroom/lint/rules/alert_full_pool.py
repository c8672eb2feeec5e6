"""Alerts that page people for a healthy full cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.lint.expressions import Expression
from legroom.lint.promql import NO_LEVEL, Operand, operands, roles_behind, roles_in
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "alert-full-pool",
    "warning",
    "An alert on a full KV cache alone",
    "A full pool is the healthy state of a busy server: blocks of finished requests stay until somebody needs them. "
    "Pressure is a full pool while requests wait or are preempted (LR403).",
)
RULES = (RULE,)
_PRESSURE = frozenset(
    {
        "waiting",
        "preemptions",
        "queue_time",
        "swapped",
        "ttft",
        "e2e_latency",
        "inter_token",
        "prompt_tokens_recomputed",
    }
)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """An alert on the use of the pool that asks for no sign of pressure."""
    if not isinstance(subject, Expression) or subject.owner != "alert":
        return
    if roles_behind(subject.text, context) & _PRESSURE:
        return
    for operand in operands(subject.text):
        if "kv_use" in roles_in(operand.text, context) and not operand.functions & NO_LEVEL and _is_high(operand):
            name = f"{subject.name} " if subject.name else ""
            message = f"{name}fires on a full KV cache, which is healthy while nothing waits and nothing is preempted"
            suggestion = "add `and on (instance) vllm:num_requests_waiting > 0`, or take legroom export prometheus"
            yield finding(RULE, subject.locate(0), message, suggestion)
            return


def _is_high(operand: Operand) -> bool:
    """Compared from below; a sum above one is over many servers, and says how many pools are in use."""
    adds_up = "sum" in operand.functions
    return any(
        comparison.operator in (">", ">=") and not (adds_up and comparison.number > 1 and not comparison.scaled)
        for comparison in operand.comparisons()
    )
