"""`empty_cache()` in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import Invoked
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "empty-cache",
    "warning",
    "empty_cache() in another process",
    "A new process has an empty cache of its own; it cannot free another process's memory (LR104).",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """python -c "... empty_cache() ..."."""
    if not isinstance(subject, Invoked):
        return
    for i, word in enumerate(subject.words[1:], 1):
        if subject.words[i - 1].text == "-c" and "empty_cache" in word.text:
            message = "empty_cache() frees the cache of the process that calls it, and this one has just started"
            yield finding(RULE, subject.locate(word.offset), message, "leave it out")
