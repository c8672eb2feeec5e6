"""Alerts that fire every quiet night."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.lint.expressions import Expression
from legroom.lint.promql import Comparison, operands, roles_behind, roles_in
from legroom.lint.rule import Context, LintFinding, Rule, finding

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


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """`rate(success) == 0` without asking whether anything runs."""
    if not isinstance(subject, Expression) or subject.owner != "alert":
        return
    if roles_behind(subject.text, context) & _LOAD:
        return
    progress = [operand for operand in operands(subject.text) if roles_in(operand.text, context) & _PROGRESS]
    compared = [comparison for operand in progress for comparison in operand.comparisons()]
    if any(comparison.operator in (">", "!=") and comparison.number >= 0 for comparison in compared):
        return  # something else must move, so somebody asks
    silent = [operand for operand in progress if not operand.functions & _NO_PROGRESS]
    if any(_is_zero(comparison) for operand in silent for comparison in operand.comparisons()):
        name = f"{subject.name} " if subject.name else ""
        message = f"{name}fires whenever no requests come in"
        suggestion = "add `and on (instance) vllm:num_requests_running > 0`"
        yield finding(RULE, subject.locate(0), message, suggestion)


def _is_zero(comparison: Comparison) -> bool:
    return comparison.number == 0 and comparison.operator in ("==", "<=")
