"""Alerts that fire every quiet night."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.exports.lint.context import Context, finding
from legroom.exports.lint.expressions import roles_in
from legroom.exports.lint.finding import Finding, Rule
from legroom.exports.lint.promql_words import comparisons
from legroom.exports.lint.subjects import Expression

RULE = Rule(
    "alert-no-traffic",
    "warning",
    "An alert on silence",
    "No request in five minutes is a quiet night, not a fault. No progress while requests run is one (LR908).",
)
RULES = (RULE,)
_PROGRESS = frozenset({"request_success", "generation_tokens", "prompt_tokens"})
_LOAD = frozenset({"running", "waiting"})


def check(subject: Any, context: Context) -> Iterator[Finding]:
    """`rate(success) == 0` without asking whether anything runs."""
    if not isinstance(subject, Expression) or subject.owner != "alert":
        return
    used = roles_in(subject.text, context)
    if not used & _PROGRESS or used & _LOAD:
        return
    for comparison in comparisons(subject.text):
        if comparison.number == 0 and comparison.operator in ("==", "<="):
            name = f"{subject.name} " if subject.name else ""
            message = f"{name}fires whenever nobody asks anything"
            suggestion = "add `and on (instance) vllm:num_requests_running > 0`"
            yield finding(RULE, subject.locate(0), message, suggestion)
            return
