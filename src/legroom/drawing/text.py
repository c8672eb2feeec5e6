"""Text layout: columns, wrapped paragraphs and command lines, counts with separators."""

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby

_CONTINUED = " \\"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NEVER_FIRST = frozenset("，。；：、）)")


def visible_len(text: str) -> int:
    """Length of the text without ANSI colour codes."""
    return len(_ESCAPE.sub("", text))


def printable(text: str) -> str:
    """Untrusted text with unprintable characters, such as line ends and changes of direction, as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """The rows as lines of aligned columns; `align` has `<` (left) or `>` (right) for each column."""
    widths = [max((visible_len(row[i]) for row in rows), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = []
        for text, side, width in zip(row, align, widths, strict=True):
            space = " " * (width - visible_len(text))
            cells.append(space + text if side == ">" else text + space)
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_wide(char: str) -> bool:
    """Whether the character takes two columns of a terminal."""
    return unicodedata.east_asian_width(char) in "WF"


def display_width(text: str) -> int:
    """Terminal columns of a text; Chinese characters take two."""
    return len(text) if text.isascii() else len(text) + sum(map(_is_wide, text))


def wrap(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Lines of `width` columns, longer words whole; `indent` starts the first, `hanging` (None: `indent`) the rest."""
    hanging = indent if hanging is None else hanging
    if display_width(text) > len(text):
        return _wrap_wide(text, width, indent, hanging)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _wrap_wide(text: str, width: int, indent: str, hanging: str) -> list[str]:
    """As `wrap`, for text with double-width characters, between any two of which a line may end."""
    lines, line, used = [], indent, len(indent)
    runs = groupby(text, lambda char: char.isspace() or _is_wide(char))
    for piece in (piece for stand_alone, run in runs for piece in (run if stand_alone else ["".join(run)])):
        needed = display_width(piece)
        if used + needed > width and line.strip() and piece not in _NEVER_FIRST:
            lines.append(line.rstrip())
            line, used = hanging, len(hanging)
            piece = piece.lstrip()  # noqa: PLW2901 - a line does not begin with a space
        line += piece
        used += needed
    return [*lines, line.rstrip()]


def wrap_command(phrases: Iterable[str], width: int) -> list[str]:
    """A command in lines of at most `width` columns, continued with backslashes; each phrase stays in one line."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + 1 + len(phrase) <= width - len(_CONTINUED):
            lines[-1] += f" {phrase}"
        else:
            lines.append(phrase)
    return [*(line + _CONTINUED for line in lines[:-1]), *lines[-1:]]


def command_phrases(words: Iterable[str]) -> list[str]:
    """The command's words with each flag joined to its value, and `vllm` to `serve`."""
    phrases: list[str] = []
    for word in words:
        last = phrases[-1] if phrases else ""
        has_value = not word.startswith("-") and last.startswith("--") and " " not in last
        if has_value or (last, word) == ("vllm", "serve"):
            phrases[-1] += f" {word}"
        else:
            phrases.append(word)
    return phrases


def paragraphs(*blocks: Iterable[str]) -> str:
    """The blocks of lines, joined with an empty line between them; an empty block is left out."""
    return "\n\n".join("\n".join(lines) for lines in map(list, blocks) if lines)


def count(number: float) -> str:
    """A number without its fraction, with thousands separators: `33,584`."""
    return f"{int(number):,}"


def plural(number: int, noun: str) -> str:
    """A number with its noun: `1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
