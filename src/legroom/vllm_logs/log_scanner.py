"""Finds the passages of a log that contain a mark of a known message, in one pass and without a loop over all lines.

Frequent marks (request logs, statistics, a crash loop) are sampled: the first, middle and last of each piece."""

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from functools import cache, lru_cache

from legroom.facts import read_data
from legroom.facts.log_messages import message_patterns, startup_lines
from legroom.regex import LiteralFinder
from legroom.vllm_logs.evidence import WINDOW_LINES, LogPassage
from legroom.vllm_logs.lines import LONGEST_LINE, read_line

MAX_LINES_PER_MARK = 300
"""After this many lines with one mark it is sampled."""
_MAX_SAMPLES_PER_PIECE = 16  # Lines of one piece that are read only because they were sampled.
_MAX_MARKS_PER_LINE = 1000  # Further marks of one line that are passed over one by one.
_LONG_LINE_BYTES = 8 << 20
_TAIL_BYTES = 1 << 20
_LONG_LINE_CONTEXT_BYTES = 16 * 1024
_PREFIX_BYTES = 160
_MAX_FOLLOWING_LINES = 10 * WINDOW_LINES  # Lines after a mark that are searched for text.
_IN_JSON = str.maketrans({'"': '\\"', "<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
# Rarer marks for start-up lines whose own mark is too common.
_RARER_MARKS = read_data("evidence.json")["rarer_marks"]


class Scanner:
    """Finds the lines that contain a mark in pieces of bytes, in one pass."""

    def __init__(self) -> None:
        self.lines = self.bytes = 0
        self.counts: Counter[bytes] = Counter()
        self._sampled: set[bytes] = set()
        once = (message for message in message_patterns() if message.role == "once")  # the first one is enough
        self._once = tuple(mark.encode() for message in once for mark in message.marks)
        self._finder: LiteralFinder | None = None

    def passages(self, pieces: Iterable[bytes]) -> Iterator[LogPassage]:
        """The lines that contain a mark (literal text of a known message), each with the lines after it; only samples
        of lines whose mark occurs more than 300 times."""
        buffer, at = b"", 0
        for piece in pieces:
            self.bytes += len(piece)
            buffer = buffer + piece if buffer else piece
            end = _search_end(buffer, len(buffer) - _TAIL_BYTES if self._sampled else len(buffer))
            if end == 0 and len(buffer) > _LONG_LINE_BYTES:
                yield from self._search_long_line(buffer, at)
                buffer = buffer[-_LONG_LINE_CONTEXT_BYTES:]
            elif end:
                at = yield from self._search_buffer(buffer, end, at)
                buffer = buffer[end:]
        if len(buffer) > _LONG_LINE_BYTES and buffer.count(b"\n") < 2:
            yield from self._search_long_line(buffer, at)
            at += 1
        elif buffer:
            at = yield from self._search_buffer(buffer, len(buffer), at, last=len(buffer) < 2 * _TAIL_BYTES)
            at += not buffer.endswith(b"\n")
        self.lines = at

    def _search_buffer(self, buffer: bytes, end: int, at: int, last: bool = False) -> Generator[LogPassage, None, int]:
        """Yields the lines of buffer[:end] with a mark, samples of frequent ones; returns `at`, the number of the lines
        before the buffer, plus that of its own. `last`: the log ends here, so that frequent marks are read too."""
        starts = sorted(self._sampled_line_starts(buffer, end))
        step = max(len(starts) / _MAX_SAMPLES_PER_PIECE, 1)
        sampled = deque(starts[int(number * step)] for number in range(min(len(starts), _MAX_SAMPLES_PER_PIECE)))
        # At the end of the log sampled marks are read line by line.
        finder = LiteralFinder(all_marks()) if last and self._sampled else self._mark_finder()
        position, counted, number, skipped = 0, 0, at, 0
        hits = finder.find(buffer, position, end)
        while True:
            hit, mark = next(hits, (end, b""))
            if hit < position:
                skipped += 1
                if skipped > _MAX_MARKS_PER_LINE:  # continues behind a line full of marks
                    hits, skipped = finder.find(buffer, position, end), 0
                continue
            skipped = 0
            start = max(buffer.rfind(b"\n", position, hit) + 1, position) if mark else end
            while sampled and sampled[0] < start:
                sample = sampled.popleft()
                if sample >= position:
                    number += buffer.count(b"\n", counted, sample)
                    counted = sample
                    yield read_passage(buffer, sample, number + 1)
            number += buffer.count(b"\n", counted, start)
            counted = start
            if not mark:
                return number
            yield read_passage(buffer, start, number + 1, hit)
            newline = buffer.find(b"\n", hit, end)
            position = newline + 1 if newline >= 0 else end
            if self._count_mark(mark):
                finder = self._mark_finder()
                hits = finder.find(buffer, position, end)

    def _sampled_line_starts(self, buffer: bytes, end: int) -> set[int]:
        """Offsets of lines in buffer[:end]: first, middle, last with each sampled mark, one with a once-read mark."""
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
                self._once = ()  # one served request is enough
                break
        return starts

    def _count_mark(self, mark: bytes) -> bool:
        """Counts an occurrence of a mark; True when from now on only samples of it are read."""
        self.counts[mark] += 1
        if self.counts[mark] != MAX_LINES_PER_MARK:
            return False
        self._sampled.add(mark)
        self._finder = None
        return True

    def _mark_finder(self) -> LiteralFinder:
        """The finder of every mark but those of which only samples are read."""
        if self._finder is None:
            self._finder = _finder_without(frozenset(self._sampled))
        return self._finder

    def _search_long_line(self, buffer: bytes, before: int) -> Iterator[LogPassage]:
        """The text around each mark (64 at most) of a line of many megabytes, which follows `before` other lines."""
        position = 0
        for _ in range(64):
            hit, mark = next(self._mark_finder().find(buffer, position, len(buffer)), (0, b""))
            if not mark:
                return
            yield read_passage(buffer, max(hit - 2000, 0), before + 1, hit)
            position = hit + _LONG_LINE_CONTEXT_BYTES


def _search_end(buffer: bytes, end: int) -> int:
    """The end of the part of buffer[:end] to search now: a newline followed by enough lines for a wrapped message."""
    for _ in range(WINDOW_LINES + 1):
        end = buffer.rfind(b"\n", 0, max(end, 0))
        if end < 0:
            return 0
    return end + 1


def read_passage(buffer: bytes, start: int, number: int, hit: int | None = None) -> LogPassage:
    """The line of this `number` that begins at `start`, and the lines after it. Of a long line only the text around
    `hit`, the offset of a mark, is read."""
    if hit is not None and hit - start > LONGEST_LINE // 2:
        start = hit - 2000
    lines: list[str] = []
    position = start
    process = _process_id(buffer, start, start + _PREFIX_BYTES)
    for _ in range(_MAX_FOLLOWING_LINES):
        if len(lines) == WINDOW_LINES or position >= len(buffer):
            break
        newline = buffer.find(b"\n", position)
        stop = newline if newline >= 0 else len(buffer)
        # Skips the empty lines left by joined lines, and lines of other processes.
        if not lines or (stop > position and (not process or _process_id(buffer, position, stop) in (process, b""))):
            lines.append(buffer[position : min(stop, position + LONGEST_LINE)].decode("utf-8", "replace"))
        if stop - position > LONGEST_LINE:
            break
        position = stop + 1
    return LogPassage(read_line(number, lines[0] if lines else ""), tuple(lines[1:]))


def _process_id(buffer: bytes, start: int, stop: int) -> bytes:
    """The `pid=N` near the beginning of the line buffer[start:stop]; empty where it has none."""
    at = buffer.find(b"pid=", start, min(stop, start + _PREFIX_BYTES))
    return buffer[at : at + 12].partition(b")")[0].partition(b",")[0] if at >= 0 else b""


@cache
def all_marks() -> tuple[bytes, ...]:
    """Every text that a known message or start-up line contains, as bytes."""
    marks = [mark for message in message_patterns() if message.role != "once" for mark in message.marks]
    for line in startup_lines():
        marks += _RARER_MARKS.get(line.mark, (line.mark,))
    marks += ["Application startup complete"]
    marks += [escaped for mark in marks if (escaped := mark.translate(_IN_JSON)) != mark]
    return tuple(dict.fromkeys(mark.encode() for mark in marks if len(mark) > 1 or mark in "█▄"))


@lru_cache(maxsize=4)
def _finder_without(sampled: frozenset[bytes]) -> LiteralFinder:
    """A finder of every mark except the `sampled` ones, built once for each such set."""
    return LiteralFinder(tuple(mark for mark in all_marks() if mark not in sampled))
