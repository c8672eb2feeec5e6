"""`empty_cache()` in a separate process."""

from __future__ import annotations

from legroom.deployments.subjects import InvokedCommand
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = "A new process has an empty cache of its own; it cannot free another process's memory (LR104)."
RULE = Rule("empty-cache", "warning", "empty_cache() in another process", _WHY)


@checks(InvokedCommand, RULE)
def empty_cache_in_other_process(command: InvokedCommand, context: Context) -> Findings:
    """A `python -c` command that calls empty_cache(), which frees nothing in the server's process."""
    for word in command.values_of("-c"):
        if "empty_cache" in word.text:
            message = "empty_cache() frees the cache of the process that calls it, and this one has just started"
            yield finding(RULE, command.locate(word.offset), message, "leave it out")
