"""Series that a release shows only when told to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.facts.metrics import metrics_of, name_of, role_of
from legroom.lint.expressions import NAMES_ONLY, Expression
from legroom.lint.promql import series_names
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "metric-hidden",
    "warning",
    "A deprecated series that is hidden by default",
    "Before a metric is removed a release hides it: it appears only under --show-hidden-metrics-for-version.",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Every series that is there only under a flag."""
    if not isinstance(subject, Expression) or subject.owner in NAMES_ONLY or context.any_release:
        return
    declared = metrics_of(context.release)
    shown = {name for metric in declared if not metric.hidden for name in metric.exposed}
    hidden = {name for metric in declared if metric.hidden for name in metric.exposed} - shown
    for series in series_names(subject.text):
        if series.name in hidden and series.name not in context.records:
            role = role_of(series.name)
            instead = name_of(role, context.release) if role else None
            message = f"vLLM {context.release} hides {series.name} unless --show-hidden-metrics-for-version is given"
            suggestion = f"write {instead}" if instead else ""
            yield finding(RULE, subject.locate(series.offset), message, suggestion, len(series.name))
