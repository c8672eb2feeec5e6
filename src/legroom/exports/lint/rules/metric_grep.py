"""`curl /metrics | grep vllm_`: a pattern that matches no line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from legroom.exports.lint.context import Context, finding
from legroom.exports.lint.finding import Finding, Rule
from legroom.exports.lint.subjects import Invoked

RULE = Rule(
    "metric-grep",
    "error",
    "A pattern that matches none of vLLM's series",
    "The names have a colon after vllm; a pattern with an underscore finds nothing and looks like silence.",
)
RULES = (RULE,)
_NAME = re.compile(r"vllm[_:][a-z0-9_]+")


def check(subject: Any, context: Context) -> Iterator[Finding]:
    """grep behind something that reads /metrics."""
    if not isinstance(subject, Invoked) or "/metrics" not in subject.line or not subject.words:
        return
    if subject.words[0].text.rpartition("/")[2] not in ("grep", "egrep", "rg", "awk", "sed"):
        return
    for word in subject.words[1:]:
        for found in _NAME.finditer(word.text):
            if any(name.startswith(found[0]) or found[0] in name for name in context.series):
                continue
            right = found[0].replace("vllm_", "vllm:", 1)
            offset = word.offset + max(word.raw.find(found[0]), 0)
            is_start = any(name.startswith(right) for name in context.series)
            yield finding(
                RULE,
                subject.locate(offset),
                f"no series of vLLM {context.release} has {found[0]} in its name",
                f"write {right}" if is_start else "",
                len(found[0]),
            )
