"""Small text layout: columns, wrapped paragraphs, counts with separators."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


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


def wrap(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """A paragraph in lines of at most `width`, words and flags kept whole."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def count(number: float) -> str:
    """`33,584`."""
    return f"{int(number):,}"


def plural(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
