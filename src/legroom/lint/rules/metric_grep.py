"""`curl /metrics | grep vllm_`: a pattern that matches no line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from legroom.deployments.shell.lexer import Word
from legroom.deployments.subjects import InvokedCommand
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = "The names have a colon after vllm; a pattern with an underscore finds nothing and looks like silence."
RULE = Rule("metric-grep", "error", "A pattern that matches none of vLLM's series", _WHY)
_NAME = re.compile(r"(?<![A-Za-z0-9_])vllm[_:][a-z0-9_]+")
"""Not `ray_vllm_...`, which is how Ray shows them."""
_RENAMES = re.compile(r"\bsed\b[^|]*\bs([/#,@])[^|]*:|\btr\b[^|]*:")


@checks(InvokedCommand, RULE)
def grep_without_match(command: InvokedCommand, context: Context) -> Findings:
    """A grep, awk or sed over /metrics for a name that no series of vLLM contains."""
    if "/metrics" not in command.line or not command.words:
        return
    if ".metrics.k8s.io" in command.line:
        return  # a metrics adapter exposes series under names without colons
    if command.words[0].text.rpartition("/")[2] not in ("grep", "egrep", "rg", "awk", "sed") or _is_renamed(command):
        return
    shown = context.series | context.declared
    for word in _grep_patterns(command):
        names = _NAME.findall(word.text)
        unknown = [name for name in names if not any(name in series for series in shown)]
        rights = {name: name.replace("vllm_", "vllm:", 1) for name in unknown}
        # `vllm:a|vllm_a` matches either spelling, and a name that no series of vLLM starts with may be an exporter's.
        is_certain = unknown == names and all(map(context.has_series_with_prefix, rights.values()))
        for name, right in rights.items():
            place = command.locate(word.offset + max(word.raw.find(name), 0))
            message = f"no series of vLLM {context.release} has {name} in its name"
            suggestion = f"write {right}" if context.has_series_with_prefix(right) else ""
            yield finding(RULE, place, message, suggestion, len(name), is_certain=is_certain)


def _grep_patterns(command: InvokedCommand) -> Iterator[Word]:
    """The patterns of -e, or the first argument that is not an option."""
    given = list(command.values_of("-e", "--regexp"))
    plain = ((before, word) for before, word in pairwise(command.words) if not word.text.startswith("-"))
    for word in given or [word for before, word in plain if not _takes_value(command, before)][:1]:
        replacing = re.match(r"s(\W)(.*?)\1", word.text)
        yield word.with_text(replacing[2]) if replacing else word


def _takes_value(command: InvokedCommand, option: Word) -> bool:
    """Whether the next word is the option's value, for grep or awk."""
    # -F and -v have a value in awk and none in grep.
    is_awk = command.words[0].text.endswith("awk")
    return option.text in (("-F", "-v") if is_awk else ("-A", "-B", "-C", "-m", "--max-count", "--context"))


def _is_renamed(command: InvokedCommand) -> bool:
    """Whether an earlier command of the pipeline replaces the colon in the names."""
    own = " ".join(word.raw for word in command.words)
    return bool(_RENAMES.search(command.line.partition(own)[0]))
