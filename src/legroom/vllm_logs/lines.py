"""Lines of a log as the server wrote them: wrapped lines are rejoined and prefixes of platforms removed.

Terminals and mails wrap lines, which would hide messages from patterns. A joined line is followed by as many empty
lines as it absorbed, so that line numbers do not change."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, pairwise

from legroom.facts import pattern as reading_pattern
from legroom.facts import read_data
from legroom.facts.log_messages import message_openings, message_patterns
from legroom.records import dataclass

_SAMPLE_BYTES = 256 * 1024
_NARROWEST, _WIDEST = 40, 300
LONGEST_LINE = 64 * 1024
_USUAL_WIDTHS = frozenset({72, 80, 100, 120, 132})
_USUAL_NARROWEST = min(_USUAL_WIDTHS)
_SHORT = 8  # In a text of at most this many lines one break is enough.
_FEWEST_BREAKS = 2
_BROKEN_SHARE = 0.03
_WORD_BROKEN_SHARE = 0.2

# Beginnings of lines that never continue a wrapped line: prefixes, lines of tracebacks, table borders.
_NEW_LINE_START = reading_pattern("lines.new_line_start")
_INDENTED = re.compile(r"[ \t]{2}")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning): ")


@dataclass(frozen=True, slots=True)
class LineWidth:
    """The width at which a text was wrapped, and whether only between words."""

    characters: int
    at_words: bool

    def breaks(self, line: str, following: str) -> bool:
        """Whether `following` is the rest of `line`, wrapped at this width, rather than a line of its own."""
        if not following.strip() or _NEW_LINE_START.match(following) or following[:8] == line[:8]:
            return False  # rows of a table
        if self.at_words:
            room = self.characters - len(line.rstrip())
            fits = 0 <= room <= len(following.split(None, 1)[0])
            return fits and not _INDENTED.match(following) and not _EXCEPTION.match(following)
        if len(line) != self.characters:
            return False
        if _INDENTED.match(following):  # a new line, unless only a prefix precedes it
            return not without_prefixes(line).strip()
        # The name of an error can be wrapped: `torch.OutOf` and `MemoryError: `.
        return not _EXCEPTION.match(following) or line[-1:].isalnum() or line.endswith(".")

    def rejoined(self, line: str, following: str) -> str:
        """The line joined with its wrapped rest, and with a space between them where wrapping removed one."""
        if self.at_words:
            return f"{line.rstrip()} {following.lstrip()}"
        # A blank at the break is lost in pasted text.
        is_lost = line[-1:] in ",;" and following[:1].isalnum()
        words = [line.rsplit(" ", 1)[-1].lower(), following.split(" ", 1)[0].lower()]
        is_lost = is_lost or (min(map(len, words)) > 6 and {*words} <= _message_words())
        return f"{line} {following}" if is_lost else line + following


def rejoin_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The log with wrapped lines joined; unchanged if its beginning was not wrapped at one width."""
    source = iter(pieces)
    first = next(source, b"")
    width = line_width(first[:_SAMPLE_BYTES].decode("utf-8", "replace"))
    if width is None:
        yield from chain((first,), source)
        return
    pending = b""
    for piece in chain((first,), source):
        whole, rest = _join_wrapped_lines((pending + piece).split(b"\n"), width, more=True)
        pending = b"\n".join(rest)
        if whole:
            yield b"\n".join(whole) + b"\n"
    if pending:
        yield b"\n".join(_join_wrapped_lines(pending.split(b"\n"), width, more=False)[0])


def line_width(beginning: str) -> LineWidth | None:
    """The width at which this beginning of a text was wrapped; None where it was not."""
    lines = [line.rstrip("\r") for line in beginning.split("\n")]
    longest = max(map(len, lines))
    if not _NARROWEST <= longest <= _WIDEST:
        return None
    filled = sum(map(bool, lines))
    at_column, at_words = LineWidth(longest, at_words=False), LineWidth(longest, at_words=True)
    full, broken = (
        sum(width.breaks(line, following) for line, following in pairwise(lines)) for width in (at_column, at_words)
    )
    fewest = 1 if filled <= _SHORT and longest >= _USUAL_NARROWEST else _FEWEST_BREAKS
    # Text wrapped at a column fills its lines; text wrapped at words ends most lines before the width.
    spaced = sum(
        at_column.breaks(line, following) and (line[-1:].isspace() or following[:1].isspace())
        for line, following in pairwise(lines)
    )
    at_spaces = broken > full == spaced > 0
    # One message of a few lines: every line but the last is broken.
    is_unusual = broken > full and longest not in _USUAL_WIDTHS
    if 0 < broken == filled - 1 < _SHORT and not spaced and (is_unusual or _breaks_between_words(lines)):
        return at_words if longest >= _USUAL_NARROWEST or broken >= _FEWEST_BREAKS else None
    if broken > 2 * full or at_spaces or (broken > full == 1 and longest not in _USUAL_WIDTHS):
        return at_words if broken >= max(fewest, filled * _WORD_BROKEN_SHARE) else None
    enough = full >= max(_FEWEST_BREAKS, filled * _BROKEN_SHARE)
    is_prompt = full == 1 and lines[0].startswith("$ ") and len(lines[0]) == longest
    is_short = full and longest in _USUAL_WIDTHS and filled <= _SHORT and not is_prompt
    return at_column if enough or is_short else None


def _breaks_between_words(lines: list[str]) -> bool:
    """Whether each line ends and the next begins with a whole known word, so that no word was cut in two."""
    filled = [words for line in lines if (words := line.lower().split())]
    return all({before[-1], after[0]} <= _message_words() for before, after in pairwise(filled))


@cache
def _message_words() -> frozenset[str]:
    """The lower-case words of all known log messages."""
    texts = (*message_openings(), *(mark for message in message_patterns() for mark in message.marks))
    return frozenset(" ".join(texts).lower().split())


def _join_wrapped_lines(lines: list[bytes], width: LineWidth, more: bool) -> tuple[list[bytes], list[bytes]]:
    """(joined lines, those that wait for the next piece of the log): the second is empty unless `more` follows."""
    whole: list[bytes] = []
    number = 0
    while number < len(lines):
        line = part = _decode(lines[number])
        taken = 1
        while number + taken < len(lines) and len(line) < LONGEST_LINE:
            following = _decode(lines[number + taken])
            if not width.breaks(part, following):
                break
            line, part = width.rejoined(line, following), following
            taken += 1
        if more and number + taken >= len(lines) - 1:
            break
        whole += [line.encode("utf-8"), *[b""] * (taken - 1)]
        number += taken
    return whole, lines[number:]


def _decode(line: bytes) -> str:
    """The line as text, bad UTF-8 replaced, without the carriage return of Windows."""
    return line.decode("utf-8", "replace").rstrip("\r")


_JSON_MESSAGE_KEYS = ("message", "msg", "log", "MESSAGE", "text", "textPayload", "body", "event")
_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[A-Za-z]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ASCII_OF = str.maketrans("０１２３４５６７８９＝．％＋－＿～\u00a0\u2009\u202f\u3000‐‑−", "0123456789=.%+-_~    ---")
_GROUPED_BY_SPACE = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")
_ABOUT = re.compile(r"[≈∼≃] ?(?=\d)")
_DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}(?: ?/ ?\d{1,4},\d{1,2})? ?[GMKT](?:i?B|io)\b)")
_GLUED_SIZE = re.compile(r"(?<=[a-z]{3})(?=\d+(?:\.\d+)?[GM]i?B)|(?<=\d[GM]iB)(?=[a-z]{3})|(?<=process)(?=\d{3})")
_GLUED_SHARE = re.compile(r"(?i)(?<![a-z])(gmu|util)(?:_|=)?(?:0?\.|0)(\d{1,3})(?![\d.])")
_FRENCH_UNIT = re.compile(r"(?<=\d)( ?[GMKT]i)o\b")

# Anchored at the start and without nested repetition, so `re` is linear on them.
_PREFIXES = tuple(re.compile(prefix) for prefix, _ in read_data("evidence.json")["line_prefixes"])
_SERVICE = re.compile(r"\s{0,4}(?:(?!CCL_)([\w./@-]{1,80})\s{0,8}\| |\[(pod/[^\]\s]{1,200})\] )")
_PROCESS = reading_pattern("lines.process")
_RANK = re.compile(r"\[rank(\d+)\]|Worker_(?:\w*_)?TP(\d+)|VllmWorker-(\d+)")
_VLLM_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_ISO_TIME = re.compile(r"\b\d{4}-(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_LOGGED_AT = re.compile(r"(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (\[?)([\w./]{1,80}\.py):(\d+)\]")
_PROMPT = re.compile(r"(?:Received request|Added request)[^\n]{0,120}?:? ?prompt:")


@dataclass(frozen=True, slots=True)
class LogLine:
    number: int
    raw: str
    """Without colours and JSON envelope, with prefixes."""
    text: str
    """Without prefixes."""
    process: str = ""
    rank: int | None = None
    pid: int | None = None
    time: str = ""
    """`MM-DD hh:mm:ss` as vLLM prints it; empty where the line has none."""
    at: str = ""
    """The file that logged it, such as `core.py`, `[` in front where the release writes brackets."""


def read_line(number: int, raw: str) -> LogLine:
    """The log line of this number and text (`raw`), with process, rank, pid and time read from its prefixes."""
    text = server_text(raw)
    head = text[:400]
    process = _process_label(head) if "pid=" in head else None
    rank = _RANK.search(head) if "rank" in head or "Worker" in head else None
    at, time, iso_time = _LOGGED_AT.search(head), _VLLM_TIME.search(head), _ISO_TIME.search(head)
    return LogLine(
        number,
        text,
        without_prefixes(text),
        process["label"] if process else "",
        int(rank[rank.lastindex or 0][:6]) if rank else int(process["rank"]) if process and process["rank"] else None,
        int(process["pid"][:12]) if process else None,
        time[1] if time else f"{iso_time[1]} {iso_time[2]}" if iso_time else "",
        f"{at[1]}{at[2].rpartition('/')[2]}" if at else "",
    )


def service_name(raw: str) -> str:
    """The service or pod that `docker compose logs` or `kubectl logs --prefix` puts in front of a line; else empty."""
    match = _SERVICE.match(raw[:300])
    return (match[1] or match[2]) if match else ""


def server_text(raw: str) -> str:
    """What the server logged, without colours, JSON record and the user's prompt; "" for a line of `legroom run`."""
    text = plain_line(raw)
    if "legroom: " in text[:400] and without_prefixes(text[:400]).startswith("legroom: "):
        return ""
    if " request " in text[:400]:
        prompt = _PROMPT.search(text[:2000])
        if prompt:
            return text[: prompt.end()]
    return text


def without_prefixes(raw: str) -> str:
    """The line's text behind the prefixes of platform (Docker, Kubernetes), executor and logger."""
    text = raw
    for _ in range(6):
        head = text.lstrip(" ")
        for prefix in _PREFIXES:
            match = prefix.match(head)
            if match:
                text = head[match.end() :]
                break
        else:
            return text
    return text


def with_ascii_figures(text: str) -> str:
    """The text with figures as programs print them: no full-width digits, decimal commas or stuck words."""
    if not text.isascii():
        text = _ABOUT.sub("", _GROUPED_BY_SPACE.sub(",", text)).translate(_ASCII_OF)
    text = _GLUED_SHARE.sub(r"\1 0.\2", _GLUED_SIZE.sub(" ", _DECIMAL_COMMA.sub(".", text)))
    return _FRENCH_UNIT.sub(r"\1B", text)


def plain_line(raw: str) -> str:
    """The line without colours, control and text-direction characters; of a collector's JSON record its message."""
    line = raw[:LONGEST_LINE].rstrip("\r\n")
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    if "\r" in line:  # a progress bar rewrites its line; the last state is the one that stayed
        line = line.rpartition("\r")[2] or line
    stripped = line.strip()
    if stripped.startswith("{") and stripped.endswith("}"):
        line = _message_of_json(stripped) or line
    return with_ascii_figures(_CONTROL.sub(" ", line) if _CONTROL.search(line) else line)


def _message_of_json(text: str) -> str | None:
    """The message and traceback in a JSON log record, without colours; None where the text is no such record."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    message = next((record[key] for key in _JSON_MESSAGE_KEYS if isinstance(record.get(key), str)), None)
    if message is None:
        return None
    for key in ("exc_info", "exception", "stack_trace", "traceback", "error"):
        if isinstance(record.get(key), str):
            message = f"{message} {record[key]}"
    return _COLOUR.sub("", message).rstrip("\r\n")


def _process_label(head: str) -> re.Match[str] | None:
    """The match of the last process label such as `(EngineCore pid=7)` in a line's `head`; None without one."""
    last = _PROCESS.search(head)
    while last and (behind := _PROCESS.match(head, last.end())):
        last = behind
    return last
