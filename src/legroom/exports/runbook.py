"""`legroom export runbook`: the troubleshooting tree of the catalog, as Markdown with Mermaid and as SVG."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from legroom.drawing.svg import Svg
from legroom.drawing.text import wrap
from legroom.explain.catalog_entries import bundled
from legroom.explain.entry import Entry, Language, Localized
from legroom.exports.export_request import MARK, ExportedFile, ExportRequest
from legroom.facts import read_data
from legroom.records import dataclass

NAME = "runbook"
HELP = "the troubleshooting tree of the catalog: Markdown with Mermaid, and SVG"
_SIGNED = f"<!-- {MARK}. -->\n"
_WORDS: Mapping[str, Mapping[str, str]] = read_data("runbook_words.json")


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--language", choices=("en", "zh"), default="en", help="English or Chinese (default: en)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """runbook.md and runbook.svg, the bundled failure catalog as a decision tree."""
    language: Language = request.options.get("language", "en")
    branches = branches_with_entries(bundled())
    return (
        ExportedFile("runbook.md", "\n".join((*_markdown_lines(branches, language), "", _SIGNED))),
        ExportedFile("runbook.svg", runbook_svg(branches, language) + _SIGNED),
    )


def _markdown_lines(branches: "Sequence[Branch]", language: Language) -> Iterator[str]:
    """The runbook's Markdown: a flowchart and a section for each branch."""
    words = _WORDS[language]
    yield from (f"# {words['title']}", "", words["intro"], "", f"![{words['title']}](runbook.svg)", "")
    yield from (f"## {words['where']}", "", "```mermaid", overview_flowchart(branches, language).rstrip(), "```")
    for branch in branches:
        yield from ("", f"## {branch.question.in_language(language)}", "")
        yield from (f"{words['look']}: {branch.look.in_language(language)}.", "")
        yield from ("```mermaid", branch_flowchart(branch, language).rstrip(), "```")
        for entry in branch.entries:
            yield from _entry_lines(entry, language)


def _entry_lines(entry: Entry, language: Language) -> Iterator[str]:
    """Markdown lines of one catalog entry: signs, cause, workarounds with their counts, dead ends."""
    words = _WORDS[language]
    yield from ("", f"### {entry.id}: {entry.title.in_language(language)}", "")
    for signature in entry.signatures[:2]:
        yield from (f"{words['sign']}: {signature.text.in_language(language)}", "")
    yield from (f"{words['why']}: {entry.cause.in_language(language)}", "", f"**{words['do']}**", "")
    for workaround in entry.workarounds:
        count = entry.counted(workaround.kind)
        counted = words["worked"].format(worked=count.worked, tried=count.tried) if count.tried else ""
        how = workaround.how.in_language(language)
        fence = "``" if "`" in how else "`"
        extra = "; ".join(filter(None, (workaround.condition.in_language(language), counted)))
        yield f"- {workaround.action.in_language(language)}: {fence}{how}{fence}" + (f" ({extra})" if extra else "")
    yield from ("", f"**{words['not']}**", "")
    for dead in entry.dead_ends:
        read = f" ({words['myth']})" if dead.myth else ""
        yield f"- {dead.action.in_language(language)}{read}: {dead.why_fails.in_language(language)}"
    if entry.story:
        yield from ("", f"{words['verify']}: {entry.story.verify.in_language(language)}")
    for name, ids in (("next", entry.leads_to), ("confused", entry.confused_with)):
        if ids:
            yield from ("", f"{words[name]}: {', '.join(ids)}")


@dataclass(frozen=True, slots=True)
class Branch:
    """A group of causes by where the failure happens."""

    key: str
    """The first digit of its entries."""
    question: Localized
    look: Localized
    """How to recognize it."""
    colour: str
    entries: tuple[Entry, ...] = ()


_YES = {"en": "yes", "zh": "是"}
_NO = {"en": "no", "zh": "否"}
_START = {"en": "vLLM stops, or requests fail", "zh": "vLLM 停止，或请求失败"}
_LEFT, _QUESTION = 24.0, 236.0
_CAUSES, _REMEDIES = 300.0, 770.0
_ROW, _GAP = 22.0, 26.0
_TITLE = {"en": "What to do when vLLM runs out of memory", "zh": "vLLM 显存不足时怎么办"}
_COLUMNS = {"en": ("where", "what it is", "what to try first"), "zh": ("位置", "原因", "先试什么")}
_BRANCHES = (
    Branch(
        "9",
        Localized("Is it something else than memory?", "是否根本不是显存问题？"),
        Localized(
            "the last lines name a driver, a kernel, NCCL or a flag, and no size",
            "末尾几行提到驱动、内核、NCCL 或参数，没有字节数",
        ),
        "grey",
    ),
    Branch(
        "1",
        Localized("Does it end while the model loads?", "是否在加载模型时失败？"),
        Localized("before the line that says what model loading took", "在 Model loading took 之前"),
        "blue",
    ),
    Branch(
        "3",
        Localized("In the profile run, in graph capture or in a warm-up?", "是否在探测、图捕获或预热时失败？"),
        Localized(
            "after loading; profile_run, capture_model or warming up is in the traceback",
            "加载之后；堆栈里有 profile_run、capture_model 或 warm up",
        ),
        "purple",
    ),
    Branch(
        "2",
        Localized("When the KV cache is sized?", "是否在确定 KV 缓存大小时失败？"),
        Localized(
            "the message speaks of cache blocks, of max seq len or of KV cache memory",
            "报错提到 cache blocks、max seq len 或 KV cache memory",
        ),
        "green",
    ),
    Branch(
        "4",
        Localized("While it serves?", "是否在服务期间出现？"),
        Localized("it had started, and requests were answered", "已经启动，并且处理过请求"),
        "orange",
    ),
    Branch(
        "5",
        Localized("Is it the host?", "是否是主机的问题？"),
        Localized(
            "the process was killed, or /dev/shm, pinned or unified memory is named",
            "进程被杀死，或提到 /dev/shm、锁页内存、统一内存",
        ),
        "red",
    ),
)


def branches_with_entries(entries: Iterable[Entry]) -> tuple[Branch, ...]:
    """The branches of the decision tree, each with its entries of the failure catalog."""
    own = [entry for entry in entries if entry.id.startswith("LR") and entry.story is not None]
    branches = (
        replace(branch, entries=tuple(entry for entry in own if entry.id[2:3] == branch.key)) for branch in _BRANCHES
    )
    return tuple(branch for branch in branches if branch.entries)


def _first_remedy(entry: Entry, language: Language) -> str:
    """The first workaround of a catalog entry; empty where it has none."""
    return entry.workarounds[0].action.in_language(language) if entry.workarounds else ""


def overview_flowchart(branches: Sequence[Branch], language: Language) -> str:
    """A Mermaid flowchart that asks the branches' questions in turn, each with its number of catalog entries."""
    lines = ["flowchart TD", f"  start([{mermaid_label(_START[language])}])"]
    before, arrow = "start", "-->"
    for branch in branches:
        node = f"q{branch.key}"
        lines.append(f"  {node}{{{mermaid_label(branch.question.in_language(language))}}}")
        lines.append(f"  {before} {arrow} {node}")
        ids = f"LR{branch.key}xx: {len(branch.entries)}"
        lines.append(f"  {node} -->|{_YES[language]}| a{branch.key}[{mermaid_label(ids)}]")
        before, arrow = node, f"-->|{_NO[language]}|"
    lines.append(f"  {before} {arrow} unknown[{mermaid_label('legroom diagnose vllm.log')}]")
    return "\n".join(lines) + "\n"


def branch_flowchart(branch: Branch, language: Language) -> str:
    """A Mermaid flowchart of one branch: causes, first workarounds and follow-up causes."""
    lines = ["flowchart LR", f"  start{{{mermaid_label(branch.question.in_language(language))}}}"]
    for entry in branch.entries:
        lines.append(f"  {entry.id}[{mermaid_label(f'{entry.id}: {entry.title.in_language(language)}')}]")
        lines.append(f"  start --> {entry.id}")
        if remedy := _first_remedy(entry, language):
            lines.append(f"  {entry.id} --> {entry.id}do([{mermaid_label(remedy)}])")
    shown = {entry.id for entry in branch.entries}
    follow_ups = [(entry.id, following) for entry in branch.entries for following in entry.leads_to]
    lines += [f"  {cause} -.-> {following}" for cause, following in follow_ups if following in shown]
    return "\n".join(lines) + "\n"


def mermaid_label(text: str) -> str:
    """The text as a Mermaid label, in quotes and escaped."""
    escaped = text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
    return f'"{" ".join(escaped.split())}"'


def runbook_svg(branches: Sequence[Branch], language: Language = "en") -> str:
    """The decision tree as an SVG picture."""
    page = Svg(1280.0, _TITLE[language])
    page.text(_LEFT, 38, _TITLE[language], "sans ink", size=20, bold=True)
    for x, words in zip((_LEFT, _CAUSES + 16, _REMEDIES), _COLUMNS[language], strict=True):
        page.text(x, 66, words, "sans soft", size=12.5)
    y = 80.0
    for number, branch in enumerate(branches):
        question, where = branch.question.in_language(language), branch.look.in_language(language)
        asked = len(wrap(question, 24)) * 18 + len(wrap(where, 33)) * 15 + 26.0
        height = max(_ROW * len(branch.entries), asked)
        if number:
            middle = _LEFT + _QUESTION / 2
            page.line(middle, y - _GAP, middle, y)
            page.text(middle + 6, y - _GAP / 2 + 4, _NO[language], "sans soft", size=11)
        _draw_branch(page, branch, y, height, language)
        y += height + _GAP
    return page.render(y)


def _draw_branch(page: Svg, branch: Branch, y: float, height: float, language: Language) -> None:
    """Draws one branch, its question and causes, `height` pixels high from `y` on."""
    page.box(_LEFT, y, _QUESTION, height, css="box", round_=6)
    page.box(_LEFT, y, 5, height, fill=branch.colour)
    row = y + 20
    for line in wrap(branch.question.in_language(language), 24):
        page.text(_LEFT + 16, row, line, "sans ink", size=14, bold=True)
        row += 18
    row += 2
    for line in wrap(branch.look.in_language(language), 33):
        page.text(_LEFT + 16, row, line, "sans soft", size=11.5)
        row += 15
    spine, middle = _CAUSES - 14, y + _ROW / 2
    page.line(_LEFT + _QUESTION, middle, spine, middle)
    page.line(spine, middle, spine, y + _ROW * (len(branch.entries) - 0.5))
    for number, entry in enumerate(branch.entries):
        centre = y + _ROW * (number + 0.5)
        page.line(spine, centre, _CAUSES, centre)
        page.box(_CAUSES, centre - 9, 6, 18, fill=branch.colour, tip=entry.cause.in_language(language))
        page.text(_CAUSES + 16, centre + 4, entry.id, "ink", size=12.5, bold=True)
        page.text(_CAUSES + 66, centre + 4, _truncated(entry.title.in_language(language), 58), "sans ink", size=12.5)
        page.text(_REMEDIES, centre + 4, _truncated(_first_remedy(entry, language), 68), "sans soft", size=12.5)


def _truncated(text: str, width: int) -> str:
    """The text within `width` characters, with an ellipsis where it is cut."""
    lines = wrap(text, width)
    return lines[0] if len(lines) < 2 else wrap(text, width - 2)[0] + " …"
