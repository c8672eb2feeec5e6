"""Alerts that page people for a healthy full cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.exports.lint.context import Context, finding
from legroom.exports.lint.expressions import roles_in
from legroom.exports.lint.finding import Finding, Rule
from legroom.exports.lint.promql_words import comparisons
from legroom.exports.lint.subjects import Expression

RULE = Rule(
    "alert-full-pool",
    "warning",
    "An alert on a full KV cache alone",
    "A full pool is the healthy state of a busy server: blocks of finished requests stay until somebody needs them. "
    "Pressure is a full pool while requests wait or are preempted (LR403).",
)
RULES = (RULE,)
_PRESSURE = frozenset({
    "waiting", "preemptions", "queue_time", "swapped", "ttft", "e2e_latency", "inter_token", "prompt_tokens_recomputed",
})  # fmt: skip


def check(subject: Any, context: Context) -> Iterator[Finding]:
    """An alert whose only vLLM series is the use of the pool."""
    if not isinstance(subject, Expression) or subject.owner != "alert":
        return
    used = roles_in(subject.text, context)
    if "kv_use" not in used or used & _PRESSURE:
        return
    for comparison in comparisons(subject.text):
        if comparison.operator in (">", ">="):
            name = f"{subject.name} " if subject.name else ""
            message = f"{name}fires on a full KV cache, which is healthy while nothing waits and nothing is preempted"
            suggestion = "add `and on (instance) vllm:num_requests_waiting > 0`, or take legroom export prometheus"
            yield finding(RULE, subject.locate(0), message, suggestion)
            return
