"""systemd units that leave workers running."""

from __future__ import annotations

from legroom.deployments.subjects import Unit
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = (
    "vLLM's engine and workers are processes of their own. If systemd ends only the first one, they keep the GPU's "
    "memory."
)
RULE = Rule("unit-orphans", "warning", "A unit whose workers outlive it", _WHY)


@checks(Unit, RULE)
def unit_that_leaves_workers(unit: Unit, context: Context) -> Findings:
    """A systemd unit whose KillMode or KillSignal leaves vLLM's workers behind."""
    if "vllm" not in unit.settings["ExecStart"].text.lower():
        return
    mode = unit.settings.get("KillMode")
    if mode is not None and mode.text in ("process", "none"):
        message = f"KillMode={mode.text} leaves the engine and its workers running"
        yield finding(RULE, unit.locate(mode.offset), message, "write KillMode=mixed")
    signal = unit.settings.get("KillSignal")
    if signal is not None and signal.text in ("SIGKILL", "9", "KILL"):
        message = "KillSignal=SIGKILL ends requests at once and gives workers no time to let go of the GPU"
        yield finding(RULE, unit.locate(signal.offset), message, "write KillSignal=SIGTERM")
