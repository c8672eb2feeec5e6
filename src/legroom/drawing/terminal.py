"""Colour, Unicode and width of an output stream."""

import os
from collections.abc import Mapping
from typing import Literal, TextIO

from legroom.records import dataclass

_NARROWEST, _WIDEST = 66, 100

Colour = Literal["blue", "orange", "purple", "brown", "green", "red", "grey"]
Paint = Colour | Literal["bold", "dim", "underline"]
_CODES: Mapping[Paint, str] = {
    "blue": "38;5;68",
    "orange": "38;5;214",
    "purple": "38;5;140",
    "brown": "38;5;138",
    "green": "38;5;71",
    "red": "38;5;167",
    "grey": "38;5;245",
    "bold": "1",
    "dim": "2",
    "underline": "4",
}


@dataclass(frozen=True, slots=True)
class Style:
    """Width of the output, and whether it has colour and Unicode."""

    width: int = 80
    colour: bool = False
    unicode: bool = True

    def paint(self, text: str, *names: Paint) -> str:
        """The text within ANSI codes for these colours or attributes; unchanged without colour."""
        if not self.colour or not names:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"

    def pick(self, fancy: str, plain: str) -> str:
        """`fancy` where the output can show Unicode, else `plain`."""
        return fancy if self.unicode else plain


PLAIN = Style()


def style_of(stream: TextIO, env: Mapping[str, str] | None = None) -> Style:
    """The style of a stream, by its terminal and NO_COLOR, FORCE_COLOR, COLUMNS and TERM=dumb."""
    env = os.environ if env is None else env
    dumb = env.get("TERM") == "dumb"
    columns = env.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else _columns_of(stream)
    colour, unicode = _has_colour(stream, env, dumb), not dumb and _has_unicode(stream)
    return Style(width=max(_NARROWEST, min(width, _WIDEST)), colour=colour, unicode=unicode)


def _has_colour(stream: TextIO, env: Mapping[str, str], dumb: bool) -> bool:
    """Whether to colour: NO_COLOR and FORCE_COLOR decide first, else whether it is a terminal that is not dumb."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and not dumb


def _has_unicode(stream: TextIO) -> bool:
    """Whether the stream's encoding has the characters that bars are drawn with."""
    try:
        "█┤✓×".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _columns_of(stream: TextIO) -> int:
    """The terminal's columns; 80 where the stream is no terminal or its width is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 80
    except (OSError, ValueError):
        return 80
