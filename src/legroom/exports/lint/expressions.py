"""What an expression measures, whatever names it uses."""

from __future__ import annotations

from legroom.exports.lint.context import Context
from legroom.exports.lint.promql_words import series_names
from legroom.facts.metrics import nearest, role_of


def roles_in(expression: str, context: Context) -> set[str]:
    """The roles of its series; one that is misspelt counts as what it should be, an unknown one as itself."""
    found = set()
    for series in series_names(expression):
        role = role_of(series.name)
        if role is None and series.name.startswith("vllm"):
            instead = nearest(series.name, context.release)
            role = role_of(instead) if instead else None
        if role is not None or series.name.startswith("vllm"):
            found.add(role or series.name)
    return found
