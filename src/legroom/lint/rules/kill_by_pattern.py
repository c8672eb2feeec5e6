"""Processes killed by a name pattern."""

from __future__ import annotations

import re

from legroom.deployments.subjects import InvokedCommand
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = (
    "The pattern misses the engine's own process title, and hits every other server on the machine. End the one "
    "process that is proven to be an orphan (LR104)."
)
RULE = Rule("kill-by-pattern", "warning", "Processes are ended by a pattern", _WHY)
_SERVING = re.compile(
    r"vllm|python|llm|\bray\b|engine|\bserve\b|model|cuda|nvidia|gpu|uvicorn|api_server|\$", re.IGNORECASE
)
"""Patterns that can match a vLLM process; `http.server` or a port-forward cannot."""
_INNER = re.compile(r"\b(pgrep|pidof)\b|\bnvidia-smi\b.*-apps|\bps\b.*(\bgrep\b|\bawk\s+['\"]?/)")
_AWK_BODY = re.compile(r"\{[^{}]*\}")
"""`{print $2}` names a column, not a pattern."""


@checks(InvokedCommand, RULE)
def kill_by_pattern(command: InvokedCommand, context: Context) -> Findings:
    """pkill -f, killall, kill $(pgrep ...), pgrep ... | xargs kill, or of every process on the GPUs."""
    if not command.words:
        return
    texts = list(command.texts())
    while texts and texts[0].rpartition("/")[2] in ("sudo", "exec", "nohup", "timeout"):
        texts = texts[1:]
    name = texts[0].rpartition("/")[2] if texts else ""
    by_pattern = name in ("pkill", "killall") and "-0" not in texts
    # `kill $(pgrep ...)` is several words once it is split.
    by_pattern = by_pattern or (name == "kill" and any(_INNER.search(text) for text in texts[1:]))
    by_pattern = by_pattern or (name == "fuser" and any(text.startswith("/dev/nvidia") for text in texts))
    by_pattern = by_pattern or (name == "xargs" and "kill" in texts and bool(_INNER.search(command.line)))
    looked_for = " ".join(texts[1:]) + (command.line if name == "xargs" else "")
    if by_pattern and _SERVING.search(_AWK_BODY.sub("", looked_for)):
        shown = " ".join(command.texts())
        message = f"`{shown if len(shown) < 60 else shown[:57] + '...'}` ends whatever matches"
        suggestion = "stop the service (systemctl stop, docker stop), or see what is orphaned with legroom recover"
        yield finding(RULE, command.locate(command.words[0].offset), message, suggestion)
