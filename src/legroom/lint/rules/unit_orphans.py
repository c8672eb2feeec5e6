"""Units that leave workers behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import Unit
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "unit-orphans",
    "warning",
    "A unit whose workers outlive it",
    "vLLM's engine and workers are processes of their own. If systemd ends only the first one, they keep the GPU's "
    "memory.",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """KillMode=process or none, and SIGKILL as the first signal."""
    if not isinstance(subject, Unit) or "vllm" not in subject.settings["ExecStart"].text.lower():
        return
    mode = subject.settings.get("KillMode")
    if mode is not None and mode.text in ("process", "none"):
        message = f"KillMode={mode.text} leaves the engine and its workers running"
        yield finding(RULE, subject.locate(mode.offset), message, "write KillMode=mixed")
    signal = subject.settings.get("KillSignal")
    if signal is not None and signal.text in ("SIGKILL", "9", "KILL"):
        message = "KillSignal=SIGKILL ends requests at once and gives workers no time to let go of the GPU"
        yield finding(RULE, subject.locate(signal.offset), message, "write KillSignal=SIGTERM")
