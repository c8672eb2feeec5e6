"""Attempts to free GPU memory that hit other processes or free nothing, and units that leave processes behind."""

from __future__ import annotations

import re

from legroom.deployments.subjects import InvokedCommand, Unit
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY_KILL = (
    "The pattern misses the engine's own process title, and hits every other server on the machine. End the one "
    "process that is proven to be an orphan (LR104)."
)
KILL = Rule("kill-by-pattern", "warning", "Processes are ended by a pattern", _WHY_KILL)
_SERVING = re.compile(
    r"vllm|python|llm|\bray\b|engine|\bserve\b|model|cuda|nvidia|gpu|uvicorn|api_server|\$", re.IGNORECASE
)
"""Patterns that can match a vLLM process; `http.server` or a port-forward cannot."""
_INNER = re.compile(r"\b(pgrep|pidof)\b|\bnvidia-smi\b.*-apps|\bps\b.*(\bgrep\b|\bawk\s+['\"]?/)")
_AWK_BODY = re.compile(r"\{[^{}]*\}")
"""`{print $2}` names a column, not a pattern."""


@checks(InvokedCommand, KILL)
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
        yield finding(KILL, command.locate(command.words[0].offset), message, suggestion)


_WHY_RESET = (
    "It needs every process off the card, fails on cards with a display or NVLink peers in use, and takes neighbours "
    "down. Ending the orphan is enough (LR104)."
)
RESET = Rule("gpu-reset", "warning", "A GPU is reset", _WHY_RESET)


@checks(InvokedCommand, RESET)
def gpu_reset_to_free_memory(command: InvokedCommand, context: Context) -> Findings:
    """An `nvidia-smi --gpu-reset`, which does not free the memory of a living process."""
    if context.configures_mig:
        return  # a GPU changes its MIG mode only with a reset
    texts = [text.rpartition("/")[2] for text in command.texts()]
    if "nvidia-smi" not in texts:
        return
    for word in command.words:
        if word.text.partition("=")[0] in ("--gpu-reset", "-r"):
            message = "a reset ends every process on the card and frees no more than ending the orphan does"
            yield finding(RESET, command.locate(word.offset), message, "leave it out; legroom recover finds the orphan")


_WHY_EMPTY_CACHE = "A new process has an empty cache of its own; it cannot free another process's memory (LR104)."
EMPTY_CACHE = Rule("empty-cache", "warning", "empty_cache() in another process", _WHY_EMPTY_CACHE)


@checks(InvokedCommand, EMPTY_CACHE)
def empty_cache_in_other_process(command: InvokedCommand, context: Context) -> Findings:
    """A `python -c` command that calls empty_cache(), which frees nothing in the server's process."""
    for word in command.values_of("-c"):
        if "empty_cache" in word.text:
            message = "empty_cache() frees the cache of the process that calls it, and this one has just started"
            yield finding(EMPTY_CACHE, command.locate(word.offset), message, "leave it out")


_WHY_ORPHANS = (
    "vLLM's engine and workers are processes of their own. If systemd ends only the first one, they keep the GPU's "
    "memory."
)
ORPHANS = Rule("unit-orphans", "warning", "A unit whose workers outlive it", _WHY_ORPHANS)


@checks(Unit, ORPHANS)
def unit_that_leaves_workers(unit: Unit, context: Context) -> Findings:
    """A systemd unit whose KillMode or KillSignal leaves vLLM's workers behind."""
    if "vllm" not in unit.settings["ExecStart"].text.lower():
        return
    mode = unit.settings.get("KillMode")
    if mode is not None and mode.text in ("process", "none"):
        message = f"KillMode={mode.text} leaves the engine and its workers running"
        yield finding(ORPHANS, unit.locate(mode.offset), message, "write KillMode=mixed")
    signal = unit.settings.get("KillSignal")
    if signal is not None and signal.text in ("SIGKILL", "9", "KILL"):
        message = "KillSignal=SIGKILL ends requests at once and gives workers no time to let go of the GPU"
        yield finding(ORPHANS, unit.locate(signal.offset), message, "write KillSignal=SIGTERM")


SANDBOX = Rule(
    "unit-sandbox", "error", "A unit that keeps the GPU or the compilers from vLLM", "The server ends at its start."
)
_SANDBOXES = {
    "PrivateDevices": "hides /dev/nvidia* from the server",
    "MemoryDenyWriteExecute": "refuses the code that Triton and torch.compile generate",
}


@checks(Unit, SANDBOX)
def unit_without_gpu(unit: Unit, context: Context) -> Findings:
    """A systemd unit of vLLM with a sandbox in which it cannot start."""
    for name, effect in _SANDBOXES.items():
        setting = unit.settings.get(name)
        is_on = setting is not None and setting.text.lower() in ("yes", "true", "on", "1")
        if setting is not None and is_on and "vllm" in unit.settings["ExecStart"].text.lower():
            yield finding(SANDBOX, unit.locate(setting.offset), f"{name}={setting.text} {effect}", "leave it out")
