"""Documents: Markdown code blocks, and shell commands without a fence."""

import re
from collections.abc import Iterator
from itertools import pairwise

from legroom.deployments.file_kinds import KINDS_BY_LANGUAGE, Kind, kind_by_first_line
from legroom.deployments.source_text import Text
from legroom.facts import pattern

_FENCE = re.compile(r"^(?P<indent>[ \t]*(?:>[ \t]*)?)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+-]*)")
_SHELL_WORD, _LIKELY_SHELL = pattern("markdown.shell_word"), pattern("markdown.likely_shell")
START = pattern("markdown.start")
FENCE = "```"
_TAKEN = "\0"  # Stands for the lines that are read already.


def blocks_of(document: Text) -> list[tuple[Kind, Text]]:
    """(kind, text) of the code blocks of a Markdown text and of the shell commands between them, in file order."""
    return sorted(_code_blocks(document), key=lambda block: block[1].place(0).line)


def _code_blocks(document: Text) -> Iterator[tuple[Kind, Text]]:
    """(kind, text) of each fenced block of a known kind, then of other shell commands; last, the rest as Python."""
    lines = [line for _, line in document.lines()]
    for first, last, language in list(_fenced_rows(lines)):
        source = document.dedented_rows(first, last)
        lines[first - 1 : last + 1] = [_TAKEN] * len(lines[first - 1 : last + 1])
        if language.lower() in ("diff", "patch"):
            source = source.with_text("\n".join(_line_after_diff(line) for line in source.text.split("\n")))
        kind = KINDS_BY_LANGUAGE.get(language.lower()) or kind_by_first_line(source.text)
        if kind is None and _LIKELY_SHELL.search(source.text):
            kind = "shell"
        elif kind is None and re.search(r"^(import|from|def|class) ", source.text, re.MULTILINE):
            kind = "python"
        if kind is not None:
            yield kind, source
    row = 0
    while row < len(lines):
        end = _shell_end(lines, row) or _command_end(lines, row)
        if end:
            yield "shell", document.dedented_rows(row, end)
            lines[row:end] = [_TAKEN] * (end - row)
        row = end or row + 1
    # A file without a known suffix may be a Python program.
    rest = "\n".join("" if line == _TAKEN else line for line in lines)
    yield "python", Text(document.path, rest, document.place(0).line)


def _line_after_diff(line: str) -> str:
    """A diff's line as it is after the change (removed lines blank), at the same columns."""
    is_header = line.startswith(("---", "+++", "@@", "diff ", "index "))
    return "" if is_header or line.startswith("-") else " " + line[1:]


def _fenced_rows(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """(first row, row after the last, language) of each fenced code block."""
    i = 0
    while i < len(lines):
        opening = _FENCE.match(lines[i])
        i += 1
        if opening is None:
            continue
        first, fence = i, opening["fence"]
        closing = re.compile(rf"^[ \t]*(?:>[ \t]*)?{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
        while i < len(lines) and not closing.match(lines[i]):
            i += 1
        yield first, i, opening["language"]
        i += 1


def _paragraph_end(lines: list[str], row: int) -> int:
    """The row after the paragraph that begins at `row`, of which at most 401 lines are read."""
    last = min(len(lines), row + 401)
    while row < last and lines[row].strip() and lines[row] != _TAKEN:
        row += 1
    return row


def _shell_end(lines: list[str], first: int) -> int:
    """The row after the paragraphs from row `first` on in which every line is shell; 0 where there are none."""
    end = row = first
    while row < len(lines) and _SHELL_WORD.match(lines[row].strip()):
        paragraph = lines[row : _paragraph_end(lines, row)]
        starts = [line for before, line in pairwise(("", *paragraph)) if not before.rstrip().endswith("\\")]
        is_shell = all(_SHELL_WORD.match(line.strip()) for line in starts)
        if not paragraph or len(paragraph) > 400 or not is_shell:  # a longer one is a log
            break
        end = row = row + len(paragraph)
        while row < len(lines) and not lines[row].strip():
            row += 1
    return end if end > first and _LIKELY_SHELL.search("\n".join(lines[first:end])) else 0


def _command_end(lines: list[str], first: int) -> int:
    """The row after the server command that begins at row `first`, with its continued lines; 0 where none begins."""
    if not START.match(lines[first]):
        return 0
    end, last = first + 1, _paragraph_end(lines, first)
    while end < last and lines[end - 1].rstrip().endswith("\\"):
        end += 1
    return end
