"""Flags that a line break separates from their command."""

from __future__ import annotations

from legroom.deployments.subjects import InvokedCommand
from legroom.facts.flags import flags_ever
from legroom.lint.rule import Context, Findings, Rule, checks, finding
from legroom.vllm.command_line import plain_name

_WHY = "The line above has no backslash at its end, or is a comment: vLLM starts without this flag and all that follow."
RULE = Rule("flag-cut-off", "error", "A flag on a line of its own", _WHY)


@checks(InvokedCommand, RULE)
def flags_of_no_command(command: InvokedCommand, context: Context) -> Findings:
    """A command after a server that begins with one of vLLM's flags."""
    if command.is_cut_off and plain_name(command.words[0].text) in flags_ever():
        message = f"{command.words[0].text} does not reach vLLM: the command ends on a line before it"
        suggestion = "end every line but the last with a backslash, with no comment line between them"
        yield finding(RULE, command.locate(command.words[0].offset), message, suggestion)
