"""Flags of vLLM that stand where lint does not know what they are given to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.drawing.text import plural
from legroom.lint.read import UnclaimedFlags
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "not-understood",
    "note",
    "Flags of vLLM that were not judged",
    "They stand in a form that lint does not read, so nothing is said of them: neither that they are right nor that "
    "they are wrong.",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Once a file, at the first of them."""
    if isinstance(subject, UnclaimedFlags):
        message = (
            f"{subject.flag} is vLLM's, and what it is given to was not understood ({plural(subject.lines, 'line')})"
        )
        yield finding(RULE, subject.place, message, "lint the command itself, or what the tool makes of this file")
