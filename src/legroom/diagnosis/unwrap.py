"""Lines that a terminal or a mail broke at its width, made whole: a break inside a message hides it from a pattern.

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
_USUAL_WIDTHS = frozenset({72, 80, 100, 120, 132})
_USUAL_NARROWEST = 72
_SHORT = 8
"""Lines of a text so short that one break tells."""
_FEWEST_BREAKS = 2
_BROKEN_SHARE = 0.03
_WORD_BROKEN_SHARE = 0.2

# What never continues a broken line: indentation, a logger's, platform's or process's prefix, a traceback's own lines,
# a table's border.
_FRESH = re.compile(
    r"(?:[ \t]{2}|\((?:EngineCore|Worker|VllmWorker|APIServer|Ray|raylet|pid|\w+ (?:rank|pid)=)|"
    r"\[(?:rank\d|pod/|\d{4}-)|(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL|FATAL)\b|Traceback |File \"|During handling|"
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
        if not following.strip() or _FRESH.match(following) or following[:8] == line[:8]:
            return False  # rows of a table begin alike
        if not self.at_words:
            return len(line) == self.characters
        room = self.characters - len(line.rstrip())
        return 0 <= room <= len(following.split(None, 1)[0])

    def joined(self, line: str, following: str) -> str:
        return f"{line.rstrip()} {following.lstrip()}" if self.at_words else line + following


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
        whole, rest = _rejoined((pending + piece).split(b"\n"), width, more=True)
        pending = b"\n".join(rest)
        if whole:
            yield b"\n".join(whole) + b"\n"
    if pending:
        yield b"\n".join(_rejoined(pending.split(b"\n"), width, more=False)[0])


def line_width(sample: str) -> LineWidth | None:
    """The width at which a text was broken; None where its lines are as they were written."""
    lines = [line.rstrip("\r") for line in sample.split("\n")]
    longest = max(map(len, lines))
    if not _NARROWEST <= longest <= _WIDEST:
        return None
    filled = sum(1 for line in lines if line)
    at_column, at_words = LineWidth(longest, at_words=False), LineWidth(longest, at_words=True)
    full, broken = (
        sum(width.breaks(line, following) for line, following in pairwise(lines)) for width in (at_column, at_words)
    )
    fewest = 1 if filled <= _SHORT and longest >= _USUAL_NARROWEST else _FEWEST_BREAKS
    # Text that is broken anywhere hardly ever ends a line short of the width; between words, most lines end so.
    if broken > 2 * full or (broken > full == 1 and longest not in _USUAL_WIDTHS):
        return at_words if broken >= max(fewest, filled * _WORD_BROKEN_SHARE) else None
    enough = full >= max(_FEWEST_BREAKS, filled * _BROKEN_SHARE)
    return at_column if enough or (full and longest in _USUAL_WIDTHS and filled <= _SHORT) else None


def _rejoined(lines: list[bytes], width: LineWidth, more: bool) -> tuple[list[bytes], list[bytes]]:
    """The lines made whole; where more is to come, the last ones as they are, since they may go on."""
    whole: list[bytes] = []
    number = 0
    while number < len(lines):
        line = part = _text(lines[number])
        taken = 1
        while number + taken < len(lines) and len(line) < _LONGEST_JOINED:
            following = _text(lines[number + taken])
            if not width.breaks(part, following):
                break
            line, part = width.joined(line, following), following
            taken += 1
        if more and number + taken >= len(lines) - 1:
            break
        whole += [line.encode("utf-8"), *[b""] * (taken - 1)]
        number += taken
    return whole, lines[number:]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
