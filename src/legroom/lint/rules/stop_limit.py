"""Grace periods that are shorter than the drain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, LintFinding, Rule, finding, flag_word
from legroom.vllm.args import other_value

RULE = Rule(
    "stop-too-short",
    "warning",
    "The kill comes before the drain is over",
    "--shutdown-timeout lets running requests end; a shorter grace period kills them, and may leave GPU memory held.",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """--shutdown-timeout against what the file allows."""
    if not isinstance(subject, StartedServer) or subject.stop_limit is None:
        return
    value = other_value(context.parsed(subject).args, "--shutdown-timeout")
    if value is None or not value.isdigit() or flag_word(subject, "--shutdown-timeout") is None:
        return
    if subject.stop_limit.value <= int(value):
        message = (
            f"it is killed {subject.stop_limit.value:.0f} s after the stop, --shutdown-timeout drains for {value} s"
        )
        yield finding(RULE, subject.stop_limit.place, message, f"allow at least {int(value) + 30} s")
