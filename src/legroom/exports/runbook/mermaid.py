"""The troubleshooting tree as Mermaid flowcharts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from legroom.explain.entry import Language
from legroom.exports.runbook.tree import Branch, first_remedy

_YES = {"en": "yes", "zh": "是"}
_NO = {"en": "no", "zh": "否"}
_START = {"en": "vLLM stops, or requests fail", "zh": "vLLM 停止，或请求失败"}
_UNKNOWN = {"en": "legroom diagnose vllm.log", "zh": "legroom diagnose vllm.log"}


def overview(branches: Sequence[Branch], language: Language) -> str:
    """Which part of the runbook to turn to."""
    lines = ["flowchart TD", f"  start([{label(_START[language])}])"]
    before, arrow = "start", "-->"
    for branch in branches:
        node = f"q{branch.key}"
        lines.append(f"  {node}{{{label(branch.question.said(language))}}}")
        lines.append(f"  {before} {arrow} {node}")
        ids = f"LR{branch.key}xx: {len(branch.entries)}"
        lines.append(f"  {node} -->|{_YES[language]}| a{branch.key}[{label(ids)}]")
        before, arrow = node, f"-->|{_NO[language]}|"
    lines.append(f"  {before} {arrow} unknown[{label(_UNKNOWN[language])}]")
    return "\n".join(lines) + "\n"


def flowchart(branch: Branch, language: Language) -> str:
    """One branch: each cause, what to do first, and what it may turn into."""
    return "\n".join(_lines(branch, language)) + "\n"


def _lines(branch: Branch, language: Language) -> Iterator[str]:
    yield "flowchart LR"
    yield f"  start{{{label(branch.question.said(language))}}}"
    shown = {entry.id for entry in branch.entries}
    for entry in branch.entries:
        yield f"  {entry.id}[{label(f'{entry.id}: {entry.title.said(language)}')}]"
        yield f"  start --> {entry.id}"
        remedy = first_remedy(entry, language)
        if remedy:
            yield f"  {entry.id} --> {entry.id}do([{label(remedy)}])"
    for entry in branch.entries:
        for following in entry.leads_to:
            if following in shown:
                yield f"  {entry.id} -.-> {following}"


def label(text: str) -> str:
    """A label that Mermaid takes whatever is in it."""
    escaped = text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
    return f'"{" ".join(escaped.split())}"'
