"""Attempts to free GPU memory that hit other processes or free nothing, and units that leave processes behind."""

import re
from dataclasses import replace

from legroom.deployments.server_words import CONTAINER_TOOLS, basename, server_start
from legroom.deployments.subjects import InvokedCommand, Unit
from legroom.facts import pattern, read_data
from legroom.lint.rule import Context, Findings, checks, finding

_SERVING = pattern("freeing_memory.serving")
_INNER = re.compile(r"\b(pgrep|pidof)\b|\bnvidia-smi\b.*-apps|\bps\b.*(\bgrep\b|\bawk\s+['\"]?/)")
_AWK_BODY = pattern("freeing_memory.awk_body")


@checks(InvokedCommand, "kill-by-pattern")
def kill_by_pattern(command: InvokedCommand, context: Context) -> Findings:
    """A kill by pattern: pkill, killall, kill $(pgrep ...), pgrep ... | xargs kill, fuser on the GPUs' device files."""
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
    if by_pattern and _SERVING.search(_AWK_BODY.sub("", looked_for.replace("$(", "("))):
        place = command.locate(command.words[0].offset)
        if place.path.rpartition("/")[2] in context.entry_scripts:
            return  # its container has no other processes
        shown = " ".join(command.texts())
        message = f"`{shown if len(shown) < 60 else shown[:57] + '...'}` ends whatever matches"
        suggestion = "stop the service (systemctl stop, docker stop), or see what is orphaned with legroom recover"
        yield finding("kill-by-pattern", place, message, suggestion)


@checks(InvokedCommand, "gpu-reset", "empty-cache", "command-doubtful", "image-moving")
def doubtful_commands(command: InvokedCommand, context: Context) -> Findings:
    """Commands that match `command_mistakes.json`: they free no memory, or undo what a start needs."""
    for row in read_data("command_mistakes.json")["rows"]:
        found = re.search(row["pattern"], command.line or " ".join(command.texts()), re.DOTALL)
        if found is None or (row["rule"] == "gpu-reset" and context.configures_mig):
            continue  # a GPU changes its MIG mode only with a reset
        text = found.groupdict().get("at") or found[0]
        word = next((word for word in command.words if text in word.text), command.words[0])
        yield finding(row["rule"], command.locate(word.offset), row["message"], row["suggestion"])


_TEXT_OR_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\"[^\"]*\"|'[^']*'", re.DOTALL)
_SHELL_SYNTAX = pattern("freeing_memory.shell_syntax")


@checks(Unit, "unit-sandbox", "unit-orphans", "env-meaning")
def settings_of_unit(unit: Unit, context: Context) -> Findings:
    """Settings of a systemd unit with which vLLM cannot start, or its worker processes outlive the unit."""
    start = unit.settings["ExecStart"]
    if "vllm" not in start.text.lower():
        return
    for row in read_data("unit_settings.json")["rows"]:
        setting = unit.settings.get(row["key"])
        is_set = setting is not None and re.fullmatch(row["value"], setting.text, re.IGNORECASE)
        is_met = any(name in unit.settings for name in row.get("unless", ())) or not unit.variables.keys().isdisjoint(
            row.get("unless_variable", ())
        )
        words = tuple(start.text.split())
        at = server_start(words)
        is_direct = at is not None and basename(words[at]) not in CONTAINER_TOOLS  # Podman sends the message itself
        if setting is not None and is_set and not is_met and (is_direct or not row.get("direct")):
            message = f"{row['key']}={setting.text} {row['effect']}"
            found = finding(row["rule"], unit.locate(setting.offset), message, row["suggestion"])
            yield replace(found, severity=row.get("severity", found.severity))
    for name, word in unit.variables.items():
        if used := re.search(r"\$\{?[A-Z_]\w*", word.text):
            message = f"systemd does not expand {used[0]} in Environment=: {name} has it as it is written"
            yield finding("env-meaning", unit.locate(word.offset), message, "write the value out", len(name))
    for key, word in unit.settings.items():
        place = unit.locate(word.offset)
        if re.search(r"(?<!%)%[iI]", word.text) and "@" not in place.path.rpartition("/")[2]:
            message = f"%i is empty in {key}=: the unit is no template"
            yield finding("unit-sandbox", place, message, "call the file NAME@.service", is_certain=False)
    syntax = _SHELL_SYNTAX.search(_TEXT_OR_TEMPLATE.sub("", start.text))
    if syntax is not None:
        message = f"systemd starts no shell: {syntax[0].strip()} in ExecStart is an argument or an unknown program"
        yield finding("unit-sandbox", unit.locate(start.offset), message, "write /bin/bash -c '...', or a script")
