"""Text of catalog entries: one in full, a list, and search results."""

from collections.abc import Mapping, Sequence
from typing import Any

from legroom.drawing.terminal import Style
from legroom.drawing.text import wrap
from legroom.explain.catalog_entries import Hit
from legroom.explain.entry import Count, Entry, Language, Localized, entry_json, example_text
from legroom.render.translation import in_language

_HEADINGS = {
    "log": ("What the log says", "日志里的样子"),
    "what": ("What it is", "是什么"),
    "why": ("Why vLLM does it", "vLLM 为什么这样做"),
    "cause": ("Root cause", "根本原因"),
    "arithmetic": ("The arithmetic", "算法"),
    "example": ("For example", "例子"),
    "workarounds": ("What helps", "有效的办法"),
    "dead_ends": ("What not to try", "不要尝试"),
    "versions": ("Releases", "版本差异"),
    "os": ("Where it matters", "平台说明"),
    "verify": ("How to verify", "如何验证"),
    "otherwise": ("When it is something else", "何时是别的问题"),
    "related": ("Related", "相关条目"),
    "evidence": ("Where this comes from", "依据"),
}
_COUNTED = (
    "{} public threads counted: {} confirm the cause, {} state a fix that worked.",
    "统计了 {} 个公开讨论：{} 个确认了原因，{} 个给出了有效的修复。",
)
_NOT_COUNTED = (
    "No public thread was counted: this comes from the releases' source and the memory model.",
    "没有统计到公开讨论：来自版本源码与显存模型。",
)
_MYTH = (" (you may have read this)", "（常见误解）")


def entry_document(entry: Entry, language: Language) -> dict[str, Any]:
    """The document of `legroom explain ID --json` in one language, what changed in each release included."""
    return dict(in_language(entry_json(entry, language), language, ("change",)))


def explain_text(entry: Entry, style: Style, language: Language = "en") -> str:
    """The full explanation of one entry."""
    title = f"{style.paint(entry.id, 'red', 'bold')}  {style.paint(entry.title.in_language(language), 'bold')}"
    lines = [title, style.paint(f"{entry.label} · {entry.phase or '-'}", "dim")]
    story, printed = entry.story, [signature.text.en for signature in entry.signatures]  # as it is grepped
    words = (("leads to", "之后常见"), ("preceded by", "之前常见"), ("confused with", "容易混淆"))
    rows = zip(words, (entry.leads_to, entry.preceded_by, entry.confused_with), strict=True)
    sections: list[tuple[str, list[str]]] = [
        ("log", [line for text in printed for line in wrap(text, style.width, "  ", "    ")]),
        ("what", _story_part(story.what if story else None, style, language)),
        ("cause", wrap(entry.cause.in_language(language), style.width, "  ")),
        ("why", _story_part(story.why if story else None, style, language)),
        ("arithmetic", _story_part(story.arithmetic if story else None, style, language)),
        ("example", wrap(example_text(entry.example, language), style.width, "  ") if entry.example else []),
        ("workarounds", _workaround_lines(entry, style, language)),
        ("dead_ends", _dead_end_lines(entry, style, language)),
        ("versions", _version_lines(entry, style, language)),
        (
            "os",
            [line for name, note in entry.os_specific.items() for line in wrap(f"{name}: {note}", style.width, "  ")],
        ),
        ("verify", _story_part(story.verify if story else None, style, language)),
        ("otherwise", _story_part(story.otherwise if story else None, style, language)),
        ("related", ([f"  {word[language == 'zh']}: {', '.join(ids)}" for word, ids in rows if ids])),
        ("evidence", _evidence_lines(entry, style, language)),
    ]
    for name, body in sections:
        if body:
            lines += ["", style.paint(_HEADINGS[name][language == "zh"], "bold"), *body]
    return "\n".join(lines) + "\n"


def entry_list_text(entries: Sequence[Entry], style: Style, language: Language = "en") -> str:
    """A list of catalog entries, one line each."""
    width = max((len(entry.id) for entry in entries), default=0)
    rows = ((entry.id.ljust(width), entry.title.in_language(language), entry.label) for entry in entries)
    return "".join(f"{style.paint(id_, 'red')}  {title}  {style.paint(label, 'dim')}\n" for id_, title, label in rows)


def hits_text(hits: Sequence[Hit], style: Style, language: Language, terms: Mapping[str, str]) -> str:
    """What `terms` of a plan mean ({term: meaning}), then a line for each entry found, and how to explain the first."""
    meanings = (wrap(f"{style.paint(name, 'bold')}: {text}", style.width, "  ") for name, text in terms.items())
    said = "".join(f"{line}\n" for lines in meanings for line in lines)
    if not hits:
        return said
    listed = entry_list_text([hit.entry for hit in hits], style, language)
    return said + "\n" * bool(said) + f"{listed}\nlegroom explain {hits[0].entry.id}\n"


def _story_part(text: Localized | None, style: Style, language: Language) -> list[str]:
    """A translated paragraph of a catalog entry, wrapped; empty for None."""
    return wrap(text.in_language(language), style.width, "  ") if text else []


def _workaround_lines(entry: Entry, style: Style, language: Language) -> list[str]:
    """The entry's numbered workarounds: when each applies, how often each worked, and how to do it."""
    lines: list[str] = []
    for number, item in enumerate(entry.workarounds, 1):
        when = _condition_text(item.condition.in_language(language), language)
        advice = f"{item.action.in_language(language)}{when}{_count_text(entry.counted(item.kind), language)}"
        lines += wrap(advice, style.width, f"  {number}. ", "     ")
        if how := item.how.in_language(language):
            arrow = style.pick("→", "->")
            lines += [style.paint(line, "blue") for line in wrap(how, style.width, f"     {arrow} ", "       ")]
    return lines


def _dead_end_lines(entry: Entry, style: Style, language: Language) -> list[str]:
    """What is tried in vain against this cause, how often, and why it fails."""
    lines: list[str] = []
    cross = style.pick("✗", "x")
    for item in entry.dead_ends:
        myth = _MYTH[language == "zh"] if item.myth else ""
        when = _condition_text(item.condition.in_language(language), language)
        action = item.action.in_language(language) or item.why_fails.in_language(language)
        text = f"{action}{myth}{when}{_count_text(entry.counted(item.kind), language)}"
        lines += wrap(text, style.width, f"  {cross} ", "    ")
        if item.action.in_language(language):
            lines += wrap(item.why_fails.in_language(language), style.width, "    ")
    return lines


def _version_lines(entry: Entry, style: Style, language: Language) -> list[str]:
    """What changed in each vLLM version that the entry names."""
    lines: list[str] = []
    for item in entry.versions:
        notes = [in_language(item.behavior_change, language)] if item.behavior_change else []
        notes += [f"introduced in {item.introduced}"] if item.introduced else []
        change = "; ".join([*notes, *([f"gone in {item.removed}"] if item.removed else [])])
        lines += wrap(f"{item.version}: {change}" if change else item.version, style.width, "  ", "    ")
    return lines


def _evidence_lines(entry: Entry, style: Style, language: Language) -> list[str]:
    """How many public threads confirm the cause or state a fix that worked, and the entry's documentation."""
    texts = _COUNTED if entry.threads else _NOT_COUNTED
    counted = texts[language == "zh"].format(len(entry.threads), entry.confirmed, entry.with_fix)
    if entry.record is not None:
        counted = "Imported from a record; its rates are claims that nobody counted here."
    lines = wrap(counted, style.width, "  ")
    return [*lines, f"  {entry.documentation}"] if entry.documentation else lines


def _count_text(count: Count, language: Language) -> str:
    """` [tried in 5: worked 3, failed 2]` of a workaround in public threads; empty where nobody tried it."""
    if not count.tried:
        return ""
    if language == "zh":
        return f" [{count.tried} 个讨论试过：{count.worked} 有效，{count.failed} 无效]"
    return f" [tried in {count.tried}: worked {count.worked}, failed {count.failed}]"


def _condition_text(condition: str, language: Language) -> str:
    """The condition in brackets, as in ` (when the model is gated)`; empty for an empty condition."""
    if not condition:
        return ""
    return f"（{condition}）" if language == "zh" else f" (when {condition})"
