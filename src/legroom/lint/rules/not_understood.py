"""Flags of vLLM in a place that lint does not understand."""

from __future__ import annotations

from legroom.drawing.text import plural
from legroom.lint.linted_parts import UnclaimedFlags
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = (
    "They stand in a form that lint does not read, so nothing is said of them: neither that they are right nor that "
    "they are wrong."
)
RULE = Rule("not-understood", "note", "Flags of vLLM that were not judged", _WHY)


@checks(UnclaimedFlags, RULE)
def flags_not_understood(flags: UnclaimedFlags, context: Context) -> Findings:
    """vLLM flags in a file that belong to no server which could be read."""
    message = f"{flags.flag} is vLLM's, and what it is given to was not understood ({plural(flags.lines, 'line')})"
    yield finding(RULE, flags.place, message, "lint the command itself, or what the tool makes of this file")
