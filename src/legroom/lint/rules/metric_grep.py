"""`curl /metrics | grep vllm_`: a pattern that matches no line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from legroom.deployments.shell.scan import Word
from legroom.deployments.subjects import Invoked
from legroom.lint.rule import Context, LintFinding, Rule, finding

RULE = Rule(
    "metric-grep",
    "error",
    "A pattern that matches none of vLLM's series",
    "The names have a colon after vllm; a pattern with an underscore finds nothing and looks like silence.",
)
RULES = (RULE,)
_NAME = re.compile(r"(?<![A-Za-z0-9_])vllm[_:][a-z0-9_]+")
"""Not `ray_vllm_...`, which is how Ray shows them."""
_RENAMES = re.compile(r"\bsed\b[^|]*\bs([/#,@])[^|]*:|\btr\b[^|]*:")


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """grep behind something that reads /metrics."""
    if not isinstance(subject, Invoked) or "/metrics" not in subject.line or not subject.words:
        return
    if ".metrics.k8s.io" in subject.line:
        return  # an adapter shows series under names without colons
    if subject.words[0].text.rpartition("/")[2] not in ("grep", "egrep", "rg", "awk", "sed") or _is_renamed(subject):
        return
    shown = context.series | context.declared
    for word in _patterns(subject):
        names = _NAME.findall(word.text)
        unknown = [name for name in names if not any(name in series for series in shown)]
        rights = {name: name.replace("vllm_", "vllm:", 1) for name in unknown}
        # `vllm:a|vllm_a` matches whichever way the names are written, and beside a name that nothing of vLLM begins
        # with may stand the series of an exporter or a plugin.
        is_sure = unknown == names and all(map(context.begins_series, rights.values()))
        for name, right in rights.items():
            yield finding(
                RULE,
                subject.locate(word.offset + max(word.raw.find(name), 0)),
                f"no series of vLLM {context.release} has {name} in its name",
                f"write {right}" if context.begins_series(right) else "",
                len(name),
                None if is_sure else "warning",
            )


def _patterns(subject: Invoked) -> Iterator[Word]:
    """What is looked for: the words of -e, else the first that is no option; no file and no replacement."""
    told = [after for before, after in pairwise(subject.words) if before.text in ("-e", "--regexp")]
    words = told or [
        word
        for before, word in pairwise(subject.words)
        if not word.text.startswith("-") and not _takes_value(subject, before)
    ]
    for word in words if told else words[:1]:
        replacing = re.match(r"s(\W)(.*?)\1", word.text)
        yield word.with_text(replacing[2]) if replacing else word


def _takes_value(subject: Invoked, option: Word) -> bool:
    # -F and -v have a value in awk and none in grep.
    is_awk = subject.words[0].text.endswith("awk")
    return option.text in (("-F", "-v") if is_awk else ("-A", "-B", "-C", "-m", "--max-count", "--context"))


def _is_renamed(subject: Invoked) -> bool:
    """Whether something before it in the pipe takes the colon out of the names."""
    own = " ".join(word.raw for word in subject.words)
    return bool(_RENAMES.search(subject.line.partition(own)[0]))
