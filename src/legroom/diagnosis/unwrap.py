"""Lines that a terminal or a mail broke at its width, whole again: a break inside a message hides it from every pattern.

Each joined line is followed by as many empty ones as it took in, so that line numbers stay those of the text given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from legroom.records import dataclass

_SAMPLE_BYTES = 256 * 1024
_NARROWEST, _WIDEST = 40, 300
_LONGEST_JOINED = 64 * 1024
_USUAL_WIDTHS = frozenset({72, 76, 78, 79, 80, 100, 120, 132, 160, 200})
_FEWEST_BREAKS = 2
_BROKEN_SHARE = 0.03
_WORD_BROKEN_SHARE = 0.3

# What never continues a broken line: indentation, a logger's, platform's or process's prefix, a traceback's own lines,
# a table's border.
_FRESH = re.compile(
    r"(?:[ \t]{2}|\(\w+[ _]|\[|(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL|FATAL)\b|Traceback |File \"|During handling|"
    r"The above exc|\d{4}-\d\d-\d\d|[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:|(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning): |"
    r"[+|]|[=~^*-]{4}|\{\"|[$#>] |[\w.-]+ *\| )"
)


@dataclass(frozen=True, slots=True)
class LineWidth:
    """At how many characters a text was broken, and whether only between words."""

    characters: int
    at_words: bool

    def breaks(self, line: str, following: str) -> bool:
        """Whether `following` is the rest of `line`."""
        if not following.strip() or _FRESH.match(following):
            return False
        if not self.at_words:
            return len(line) == self.characters
        room = self.characters - len(line.rstrip())
        return 0 <= room <= len(following.split(" ", 1)[0])

    def joined(self, line: str, following: str) -> str:
        return f"{line.rstrip()} {following}" if self.at_words else line + following


def unwrapped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of a log as they are, unless its beginning shows that its lines were broken at one width."""
    source = iter(pieces)
    first = next(source, b"")
    width = line_width(first[:_SAMPLE_BYTES].decode("utf-8", "replace"))
    if width is None:
        yield from chain((first,), source)
        return
    pending = b""
    for piece in chain((first,), source):
        text, _, pending = (pending + piece).rpartition(b"\n")
        # The last line may go on in the next piece.
        head, _, last = text.rpartition(b"\n")
        pending = last + b"\n" + pending if text else pending
        if head:
            yield _rejoined(head, width) + b"\n"
    if pending:
        ended = pending.endswith(b"\n")
        yield _rejoined(pending[:-1] if ended else pending, width) + (b"\n" if ended else b"")


def line_width(sample: str) -> LineWidth | None:
    """The width at which a text was broken; None where its lines are as they were written."""
    lines = [line.rstrip("\r") for line in sample.split("\n")]
    longest = max(map(len, lines))
    if not _NARROWEST <= longest <= _WIDEST:
        return None
    filled = sum(1 for line in lines if line)
    at_column = LineWidth(longest, at_words=False)
    full = sum(1 for line, following in pairwise(lines) if at_column.breaks(line, following))
    if full >= max(_FEWEST_BREAKS, filled * _BROKEN_SHARE) or (full and longest in _USUAL_WIDTHS and filled <= 6):
        return at_column
    at_words = LineWidth(longest, at_words=True)
    broken = sum(1 for line, following in pairwise(lines) if at_words.breaks(line, following))
    return at_words if broken >= max(_FEWEST_BREAKS, filled * _WORD_BROKEN_SHARE) else None


def _rejoined(text: bytes, width: LineWidth) -> bytes:
    lines = text.decode("utf-8", "replace").split("\n")
    whole: list[str] = []
    number = 0
    while number < len(lines):
        line = part = lines[number].rstrip("\r")
        taken = 1
        while (
            number + taken < len(lines)
            and len(line) < _LONGEST_JOINED
            and width.breaks(part, lines[number + taken].rstrip("\r"))
        ):
            part = lines[number + taken].rstrip("\r")
            line = width.joined(line, part)
            taken += 1
        whole += [line, *[""] * (taken - 1)]
        number += taken
    return "\n".join(whole).encode("utf-8")
