"""What an expression measures, whatever names it uses."""

from __future__ import annotations

from legroom.exports.lint.context import Context
from legroom.exports.lint.promql_words import series_names
from legroom.facts.metrics import nearest, role_of

NO_LEVEL = frozenset({
    "absent", "absent_over_time", "changes", "count", "count_over_time", "count_values", "delta", "deriv", "group",
    "idelta", "increase", "irate", "predict_linear", "present_over_time", "rate", "resets", "stddev",
    "stddev_over_time", "stdvar", "stdvar_over_time", "time", "timestamp",
})  # fmt: skip
"""Functions whose answer is not on the scale of the series they are given."""


def roles_in(expression: str, context: Context) -> set[str]:
    """The roles of its series; one that is misspelt counts as what it should be, an unknown one as itself."""
    found: set[str] = set()
    for series in series_names(expression):
        role = role_of(series.name)
        if role is None and series.name.startswith("vllm"):
            instead = nearest(series.name, context.release)
            role = role_of(instead) if instead else None
        if role is not None or series.name.startswith("vllm"):
            found.add(role or series.name)
    return found


def roles_behind(expression: str, context: Context) -> set[str]:
    """The roles of its series, and of those from which the linted files record the others."""
    waiting = [expression]
    seen: set[str] = set()
    found: set[str] = set()
    while waiting:
        text = waiting.pop()
        found |= roles_in(text, context)
        for series in series_names(text):
            if series.name in context.records and series.name not in seen:
                seen.add(series.name)
                waiting.append(context.records[series.name])
    return found
