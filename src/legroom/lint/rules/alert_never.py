"""Thresholds that a series cannot reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.facts.metrics import releases_of
from legroom.lint.expressions import COMPARED, Expression
from legroom.lint.promql import NO_LEVEL, Operand, operands, roles_in, series_names
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding

RULE = Rule(
    "alert-never",
    "error",
    "A threshold that cannot be reached",
    "The use of the KV cache is a ratio from 0 to 1, and no more requests run than --max-num-seqs allows.",
)
RULES = (RULE,)
_ADDS_UP = NO_LEVEL | {"sum", "sum_over_time"}


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Comparisons of a single measure with a number beyond its range."""
    if not isinstance(subject, Expression) or subject.owner not in COMPARED:
        return
    for operand in operands(subject.text):
        if not operand.functions & _ADDS_UP:
            yield from _beyond(subject, operand, context)


def _severity(operand: Operand) -> Severity | None:
    """An exporter that shows the use under a name of its own may show it in percent."""
    names = [series.name for series in series_names(operand.text) if series.name.startswith("vllm")]
    return None if all(map(releases_of, names)) else "warning"


def _beyond(subject: Expression, operand: Operand, context: Context) -> Iterator[LintFinding]:
    used = roles_in(operand.text, context)
    for comparison in operand.comparisons():
        if comparison.operator not in (">", ">=") or comparison.scaled:
            continue
        if used == {"kv_use"} and comparison.number > 1:
            message = f"the KV cache's use is a ratio: it is never above 1, and {comparison.number:g} is asked for"
            suggestion = f"write {comparison.number / 100:g}" if comparison.number <= 100 else ""
            yield finding(RULE, subject.locate(comparison.offset), message, suggestion, severity=_severity(operand))
        elif used == {"running"} and context.plan is not None:
            most = int(context.plan.args["max_num_seqs"])
            if comparison.number >= most:
                message = f"the plan lets at most {most} requests run (--max-num-seqs), so this never fires"
                yield finding(RULE, subject.locate(comparison.offset), message, f"write a number below {most}")
