"""Small text layout: columns, wrapped paragraphs, counts with separators."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

_CONTINUED = " \\"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NEVER_FIRST = frozenset("，。；：、）)")


def visible_len(text: str) -> int:
    """Length on the screen, colour codes not counted."""
    return len(_ESCAPE.sub("", text))


def columns(rows: Sequence[Sequence[str]], align: str, gap: int = 2) -> list[str]:
    """Rows as lines of aligned columns; `align` has one of `<` and `>` a column."""
    widths = [max((visible_len(row[i]) for row in rows), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        line = ""
        for text, side, width in zip(row, align, widths, strict=True):
            space = " " * (width - visible_len(text))
            line += (space + text if side == ">" else text + space) + " " * gap
        lines.append(line.rstrip())
    return lines


def _is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF"


def cells(text: str) -> int:
    """How many columns of a terminal a text takes: Chinese characters take two each."""
    return len(text) if text.isascii() else len(text) + sum(map(_is_wide, text))


def wrap(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """A paragraph in lines of at most `width`, words and flags kept whole; Chinese is broken anywhere."""
    hanging = indent if hanging is None else hanging
    if cells(text) > len(text):
        return _wrap_wide(text, width, indent, hanging)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _wrap_wide(text: str, width: int, indent: str, hanging: str) -> list[str]:
    lines, line, used = [], indent, len(indent)
    for piece in _pieces(text):
        needed = cells(piece)
        if used + needed > width and line.strip() and piece not in _NEVER_FIRST:
            lines.append(line.rstrip())
            line, used = hanging, len(hanging)
            piece = piece.lstrip()  # noqa: PLW2901 - a line does not begin with the gap it was broken at
        line += piece
        used += needed
    return [*lines, line.rstrip()]


def _pieces(text: str) -> list[str]:
    """Words of Latin script whole, gaps and wide characters one by one."""
    pieces: list[str] = []
    ends = True
    for char in text:
        alone = char.isspace() or _is_wide(char)
        if alone or ends:
            pieces.append(char)
        else:
            pieces[-1] += char
        ends = alone
    return pieces


def wrap_command(phrases: Iterable[str], width: int) -> list[str]:
    """A command line in lines of at most `width` that can be pasted into a shell; phrases stay whole."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + 1 + len(phrase) <= width - len(_CONTINUED):
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return [*(line + _CONTINUED for line in lines[:-1]), *lines[-1:]]


def command_phrases(words: Iterable[str]) -> list[str]:
    """The quoted words of a command, each flag together with its value, and `vllm serve` as one."""
    phrases: list[str] = []
    for word in words:
        last = phrases[-1] if phrases else ""
        has_value = not word.startswith("-") and last.startswith("--") and " " not in last
        if has_value or (last, word) == ("vllm", "serve"):
            phrases[-1] += f" {word}"
        else:
            phrases.append(word)
    return phrases


def count(number: float) -> str:
    """`33,584`."""
    return f"{int(number):,}"


def plural(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
