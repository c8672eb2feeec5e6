"""Alerts that fire every quiet night."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.lint.context import Context, finding
from legroom.lint.expressions import Expression
from legroom.lint.finding import Finding, Rule
from legroom.lint.promql import operands, roles_behind, roles_in

RULE = Rule(
    "alert-no-traffic",
    "warning",
    "An alert on silence",
    "No request in five minutes is a quiet night, not a fault. No progress while requests run is one (LR908).",
)
RULES = (RULE,)
_PROGRESS = frozenset({"request_success", "generation_tokens", "prompt_tokens"})
_NO_PROGRESS = frozenset({"absent", "absent_over_time", "count", "resets", "time", "timestamp"})
_LOAD = frozenset({"running", "waiting"})


def check(subject: Any, context: Context) -> Iterator[Finding]:
    """`rate(success) == 0` without asking whether anything runs."""
    if not isinstance(subject, Expression) or subject.owner != "alert":
        return
    if roles_behind(subject.text, context) & _LOAD:
        return
    progress = [one for one in operands(subject.text) if roles_in(one.text, context) & _PROGRESS]
    asked = {(one.operator, one.number) for operand in progress for one in operand.comparisons()}
    if any(operator in (">", "!=") and number >= 0 for operator, number in asked):
        return  # something else must move, so somebody asks
    silent = [one for one in progress if not one.functions & _NO_PROGRESS]
    if any(one.number == 0 and one.operator in ("==", "<=") for operand in silent for one in operand.comparisons()):
        name = f"{subject.name} " if subject.name else ""
        message = f"{name}fires whenever nobody asks anything"
        suggestion = "add `and on (instance) vllm:num_requests_running > 0`"
        yield finding(RULE, subject.locate(0), message, suggestion)
