"""What a change does to the servers of a file: for a terminal, and for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from legroom.drawing.terminal import PLAIN, Style
from legroom.drawing.text import wrap
from legroom.render.plan_parts import VERDICT_COLOURS, headline
from legroom.render.verdict_text import verdict_sentences
from legroom.units import human_bytes

if TYPE_CHECKING:
    from legroom.planning.file_plans import FileServer
    from legroom.planning.plan_diff import PlanChange, ServerDiff

_WORDS = {"fits": "fits", "tight": "tight", "does_not_fit": "will not start", "unknown": "not understood", None: "none"}


def diff_text(diffs: Sequence[ServerDiff], style: Style = PLAIN) -> str:
    if not diffs:
        return "Neither version starts a vLLM server.\n"
    return "\n".join("\n".join(_server(diff, style)) + "\n" for diff in diffs)


def _server(diff: ServerDiff, style: Style) -> Iterator[str]:
    yield f"{style.paint(diff.name, 'bold')}: {_verdict(diff, style)}"
    width = max((len(change.what) for change in diff.changes), default=0)
    for change in diff.changes:
        yield f"  {change.what:<{width}}  {change.old} -> {change.new}{_amount(change)}"
    if diff.new is not None and not diff.changes and diff.old is not None:
        yield "  nothing that memory depends on has changed"
    for sentence in _told(diff.new):
        yield from wrap(sentence, style.width, "  ", "  ")


def _verdict(diff: ServerDiff, style: Style) -> str:
    before, after = diff.verdicts
    if diff.new is None:
        return "removed"
    painted = style.paint(_WORDS[after], VERDICT_COLOURS[after], "bold") if after in VERDICT_COLOURS else _WORDS[after]
    if diff.old is None:
        return f"new, {painted}"
    return painted if before == after else f"{_WORDS[before]} -> {painted}"


def _amount(change: PlanChange) -> str:
    if change.bytes is None:
        return ""
    return f"  ({'+' if change.bytes > 0 else '-'}{human_bytes(abs(change.bytes))})"


def _told(server: FileServer | None) -> tuple[str, ...]:
    """What is to be said of the new version: its headline where it is fine, the reasons where it is not."""
    if server is None:
        return ()
    sentences = verdict_sentences(server)
    return sentences or ((headline(server.shown),) if server.shown is not None else ())


def diff_markdown(title: str, diffs: Sequence[ServerDiff]) -> str:
    """A section for one file; what the file says is never markup."""
    lines = [f"### {_plain(title)}", ""]
    if not diffs:
        lines += ["Neither version starts a vLLM server.", ""]
    for diff in diffs:
        lines += _markdown_server(diff)
    return "\n".join(lines)


def _markdown_server(diff: ServerDiff) -> Iterator[str]:
    yield f"**{_plain(diff.name)}: {_verdict(diff, PLAIN)}**"
    yield ""
    if diff.changes:
        yield "| | before | after | |"
        yield "|---|---|---|---|"
        for change in diff.changes:
            cells = (change.what, change.old, change.new, _amount(change).strip())
            yield f"| {' | '.join(map(_plain, cells))} |"
        yield ""
    for sentence in _told(diff.new):
        yield f"{_plain(sentence)}"
        yield ""


def _plain(text: str) -> str:
    """Text of a file that anybody may have written, kept from being a link, a mention or a cell's end."""
    flat = " ".join(text.split())
    for character in "\\`*_{}[]<>|#@":
        flat = flat.replace(character, f"\\{character}" if character != "@" else "@\u200b")
    return flat
