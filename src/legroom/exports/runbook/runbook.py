"""`legroom export runbook`: the troubleshooting tree from the catalog, as Markdown with Mermaid and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from legroom.explain.catalog_entries import bundled
from legroom.explain.entry import Entry, Language
from legroom.exports.request import MARK, ExportedFile
from legroom.exports.runbook.tree import Branch, flowchart, overview, runbook_svg, tree

if TYPE_CHECKING:
    from legroom.exports.request import ExportRequest

NAME = "runbook"
HELP = "the troubleshooting tree of the catalog: Markdown with Mermaid, and SVG"
_SIGNED = f"<!-- {MARK}. -->\n"
_WORDS = {
    "en": {
        "title": "Runbook: vLLM and memory",
        "intro": "Generated from legroom's catalog. `legroom diagnose vllm.log` walks this tree for you, with the "
        "numbers of your server; `legroom explain LR203` tells the whole story of one cause.",
        "where": "Where does it happen?",
        "look": "How to see it",
        "sign": "In the log",
        "why": "Why",
        "do": "What helps",
        "not": "What not to try",
        "myth": "you may have read this",
        "verify": "How to verify",
        "next": "What may come next",
        "confused": "Easily taken for",
        "worked": "worked in {worked} of {tried} counted threads",
    },
    "zh": {
        "title": "手册：vLLM 与显存",
        "intro": "由 legroom 的知识库生成。`legroom diagnose vllm.log` 会结合你的服务器的数字替你走完这棵树；"
        "`legroom explain LR203` 讲述一个原因的全部细节。",
        "where": "问题出现在哪里？",
        "look": "如何辨认",
        "sign": "日志里的样子",
        "why": "原因",
        "do": "有效的办法",
        "not": "不要尝试",
        "myth": "常见误解",
        "verify": "如何验证",
        "next": "之后可能出现",
        "confused": "容易混淆",
        "worked": "统计的 {tried} 个讨论中 {worked} 个有效",
    },
}


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--language", choices=("en", "zh"), default="en", help="English or Chinese (default: en)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    language: Language = request.options.get("language", "en")
    branches = tree(bundled())
    return (
        ExportedFile("runbook.md", f"{runbook_text(branches, language)}\n{_SIGNED}"),
        ExportedFile("runbook.svg", runbook_svg(branches, language) + _SIGNED),
    )


def runbook_text(branches: Sequence[Branch], language: Language = "en") -> str:
    return "\n".join(_page(branches, language)) + "\n"


def _page(branches: Sequence[Branch], language: Language) -> Iterator[str]:
    words = _WORDS[language]
    yield from (f"# {words['title']}", "", words["intro"], "", f"![{words['title']}](runbook.svg)", "")
    yield from (f"## {words['where']}", "", "```mermaid", overview(branches, language).rstrip(), "```")
    for branch in branches:
        yield from ("", f"## {branch.question.said(language)}", "")
        yield from (f"{words['look']}: {branch.look.said(language)}.", "")
        yield from ("```mermaid", flowchart(branch, language).rstrip(), "```")
        for entry in branch.entries:
            yield from _entry(entry, language)


def _entry(entry: Entry, language: Language) -> Iterator[str]:
    words = _WORDS[language]
    yield from ("", f"### {entry.id}: {entry.title.said(language)}", "")
    for signature in entry.signatures[:2]:
        yield f"{words['sign']}: {signature.text.said(language)}"
        yield ""
    yield from (f"{words['why']}: {entry.cause.said(language)}", "", f"**{words['do']}**", "")
    for workaround in entry.workarounds:
        count = entry.counted(workaround.kind)
        counted = words["worked"].format(worked=count.worked, tried=count.tried) if count.tried else ""
        how = workaround.how.said(language)
        condition = workaround.condition.said(language)
        extra = "; ".join(text for text in (condition, counted) if text)
        yield f"- {workaround.action.said(language)}: {_code(how)}" + (f" ({extra})" if extra else "")
    yield from ("", f"**{words['not']}**", "")
    for dead in entry.dead_ends:
        read = f" ({words['myth']})" if dead.myth else ""
        yield f"- {dead.action.said(language)}{read}: {dead.why_fails.said(language)}"
    if entry.story:
        yield from ("", f"{words['verify']}: {entry.story.verify.said(language)}")
    for name, ids in (("next", entry.leads_to), ("confused", entry.confused_with)):
        if ids:
            yield from ("", f"{words[name]}: {', '.join(ids)}")


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"
