"""A log of any size -> the few passages worth reading. One automaton over all marks; never a loop over all lines.

Marks that turn out to be everywhere (request logs, statistics, a crash loop) are sampled after a while: the first and
the last of each piece, so that what changes over time is still seen and the time stays bounded by the bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from functools import cache

from legroom.facts.log_messages import message_patterns, startup_lines
from legroom.regex import LiteralFinder
from legroom.vllm_logs.evidence import WINDOW_LINES, Passage
from legroom.vllm_logs.lines import LONGEST_LINE, read_line

MOST_PER_MARK = 300
"""After this many lines with one mark it is sampled."""
_MOST_SAMPLES = 16
"""Lines of one piece that are read only because they were sampled."""
_MOST_SKIPPED = 1000
"""Further marks of one line that are passed over one by one."""
_HUGE = 8 << 20
_LAST = 1 << 20
_AROUND = 16 * 1024
_PREFIX_BYTES = 160
_MOST_LOOKED_AT = 10 * WINDOW_LINES
"""Lines behind a mark that are looked at for ones with text."""
# Marks of start-up lines that are too short to stop at; these say the same and are rarer.
_BETTER = {
    " took ": ("loading took", "weights took"),
    "tart": (),
    "model": ("█", "▄"),
    "|": ("| NVIDIA", "NVIDIA "),
    "GPU ": (),
    " blocks: ": ("# GPU blocks", "# CUDA blocks", "# cuda blocks", "# CPU blocks"),
    "version 0.": ("version 0.",),
}


class Scanner:
    """Reads pieces of bytes once, in order, and remembers how much there was."""

    def __init__(self) -> None:
        self.lines = 0
        self.bytes = 0
        self.counts: Counter[bytes] = Counter()
        self._sampled: set[bytes] = set()
        self._once: tuple[bytes, ...] = _once_marks()
        self._finder: LiteralFinder | None = None

    def passages(self, pieces: Iterable[bytes]) -> Iterator[Passage]:
        buffer, at = b"", 0
        for piece in pieces:
            self.bytes += len(piece)
            buffer = buffer + piece if buffer else piece
            end = _cut(buffer, len(buffer) - _LAST if self._sampled else len(buffer))
            if end == 0 and len(buffer) > _HUGE:
                yield from self._huge(buffer, at)
                buffer = buffer[-_AROUND:]
            elif end:
                at = yield from self._search(buffer, end, at)
                buffer = buffer[end:]
        if len(buffer) > _HUGE and buffer.count(b"\n") < 2:
            yield from self._huge(buffer, at)
            at += 1
        elif buffer:
            at = yield from self._search(buffer, len(buffer), at, last=len(buffer) < 2 * _LAST)
            at += not buffer.endswith(b"\n")
        self.lines = at

    def _search(self, buffer: bytes, end: int, at: int, last: bool = False) -> Generator[Passage, None, int]:
        """Report every line of buffer[:end] that holds a mark; the number of lines up to there comes back."""
        starts = sorted(self._samples(buffer, end))
        step = max(len(starts) / _MOST_SAMPLES, 1)
        sampled = deque(starts[int(number * step)] for number in range(min(len(starts), _MOST_SAMPLES)))
        # The end of a log tells how it ended: there, even what was everywhere before is read line by line.
        finder = LiteralFinder(every_mark()) if last and self._sampled else self._marks()
        position, counted, number, skipped = 0, 0, at, 0
        hits = finder.find(buffer, position, end)
        while True:
            hit, mark = next(hits, (end, b""))
            if hit < position:
                skipped += 1
                if skipped > _MOST_SKIPPED:  # a line full of marks was read at its first: go on behind it
                    hits, skipped = finder.find(buffer, position, end), 0
                continue
            skipped = 0
            start = max(buffer.rfind(b"\n", position, hit) + 1, position) if mark else end
            while sampled and sampled[0] < start:
                sample = sampled.popleft()
                if sample >= position:
                    number += buffer.count(b"\n", counted, sample)
                    counted = sample
                    yield passage_at(buffer, sample, number + 1)
            number += buffer.count(b"\n", counted, start)
            counted = start
            if not mark:
                return number
            yield passage_at(buffer, start, number + 1, hit)
            newline = buffer.find(b"\n", hit, end)
            position = newline + 1 if newline >= 0 else end
            if self._is_everywhere(mark):
                finder = self._marks()
                hits = finder.find(buffer, position, end)

    def _samples(self, buffer: bytes, end: int) -> set[int]:
        """Starts of the lines that hold a mark which is only sampled."""
        starts: set[int] = set()
        for mark in self._sampled:
            first = buffer.find(mark, 0, end)
            if first >= 0:
                last = buffer.rfind(mark, first, end)
                middle = buffer.find(mark, (first + last) // 2, end)
                starts |= {buffer.rfind(b"\n", 0, hit) + 1 for hit in (first, middle, last) if hit >= 0}
        for mark in self._once:
            first = buffer.find(mark, 0, end)
            if first >= 0:
                starts.add(buffer.rfind(b"\n", 0, first) + 1)
                self._once = ()  # that a request was served is all that has to be known
                break
        return starts

    def _is_everywhere(self, mark: bytes) -> bool:
        self.counts[mark] += 1
        if self.counts[mark] != MOST_PER_MARK:
            return False
        self._sampled.add(mark)
        self._finder = None
        return True

    def _marks(self) -> LiteralFinder:
        if self._finder is None:
            wanted = tuple(mark for mark in every_mark() if mark not in self._sampled)
            self._finder = LiteralFinder(wanted)
        return self._finder

    def _huge(self, buffer: bytes, at: int) -> Iterator[Passage]:
        """A line of many megabytes: what surrounds each mark in it, a bounded number of times."""
        position = 0
        for _ in range(64):
            hit, mark = next(self._marks().find(buffer, position, len(buffer)), (0, b""))
            if not mark:
                return
            yield passage_at(buffer, max(hit - 2000, 0), at + 1, hit)
            position = hit + _AROUND


def _cut(buffer: bytes, end: int) -> int:
    """Where to stop searching: behind a newline that has enough lines after it for a wrapped message."""
    for _ in range(WINDOW_LINES + 1):
        end = buffer.rfind(b"\n", 0, max(end, 0))
        if end < 0:
            return 0
    return end + 1


def passage_at(buffer: bytes, start: int, number: int, hit: int | None = None) -> Passage:
    """The line that begins at `start`, and the few after it."""
    if hit is not None and hit - start > LONGEST_LINE // 2:
        start = hit - 2000  # deep inside a long line: what surrounds the mark
    lines: list[str] = []
    position = start
    speaker = _speaker(buffer, start, start + _PREFIX_BYTES)
    for _ in range(_MOST_LOOKED_AT):
        if len(lines) == WINDOW_LINES or position >= len(buffer):
            break
        newline = buffer.find(b"\n", position)
        stop = newline if newline >= 0 else len(buffer)
        # Empty lines say nothing and stand where broken lines were joined; other ranks speak in between.
        if not lines or (stop > position and (not speaker or _speaker(buffer, position, stop) in (speaker, b""))):
            lines.append(buffer[position : min(stop, position + LONGEST_LINE)].decode("utf-8", "replace"))
        if stop - position > LONGEST_LINE:
            break
        position = stop + 1
    return Passage(read_line(number, lines[0] if lines else ""), tuple(lines[1:]))


def _speaker(buffer: bytes, start: int, stop: int) -> bytes:
    """The process that a line says it is of; empty where it does not say."""
    at = buffer.find(b"pid=", start, min(stop, start + _PREFIX_BYTES))
    return buffer[at : at + 12].partition(b")")[0].partition(b",")[0] if at >= 0 else b""


@cache
def every_mark() -> tuple[bytes, ...]:
    """Every text worth stopping at, as bytes."""
    marks = [mark for message in message_patterns() if message.role not in ("once",) for mark in message.marks]
    for line in startup_lines():
        marks += _BETTER.get(line.mark, (line.mark,))
    marks += ["Application startup complete"]
    marks += [escaped for mark in marks if (escaped := _in_json(mark)) != mark]
    return tuple(dict.fromkeys(mark.encode() for mark in marks if len(mark) > 1 or mark in "█▄"))


def _in_json(mark: str) -> str:
    """As Docker's and other JSON logs write it inside a string."""
    for character, written in (('"', '\\"'), ("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        mark = mark.replace(character, written)
    return mark


@cache
def _once_marks() -> tuple[bytes, ...]:
    return tuple(mark.encode() for message in message_patterns() if message.role == "once" for mark in message.marks)
