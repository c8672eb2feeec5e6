"""Known messages in log lines as typed evidence: id, figures, phase, process and time.

torch's out-of-memory message becomes a `TorchOom`."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

from legroom.facts import log_messages as messages
from legroom.facts import pattern as reading_pattern
from legroom.facts import read_data
from legroom.records import dataclass, field
from legroom.regex import PatternSet, compiled, escaped
from legroom.vllm_logs.lines import LogLine, server_text, without_prefixes

WINDOW_LINES = 6
"""Lines over which a message may be wrapped."""
_WINDOW_CHARS = 6000
_KEPT_CHARS = 2000
_NO_TRACEBACK = re.compile(r"\b(?:DEBUG|INFO|WARNING) {1,3}\d\d-\d\d \d\d:")
"""Levels at which no traceback is logged: such lines may name functions for other reasons."""
_SINGLE_LINE = re.compile(r"\b(?:INFO|DEBUG) \d\d-\d\d \d\d:")
_INFORMATIONAL = re.compile(r"\b(?:DEBUG|INFO) {1,3}\d\d-\d\d \d\d:|\bNCCL INFO\b|(?:^|\s)(?:INFO|DEBUG):? {2,}")
"""Lines about optional steps: a library that is not found is no failure there."""
_QUOTING = re.compile(r"^Dumping |\bFAILED \S+::")
"""Lines that name files for other reasons than a traceback: dumped inputs, pytest's summary."""
_TITLE = re.compile(r"\W*\[(?:Bug|Usage|Performance|Feature|Misc|Installation|CI Failure)\]")
"""How titles of vLLM's issues begin."""
_WARNING = re.compile(r"\bWARN(?:ING)?\b")
_NUMBER = re.compile(r"\d[\d.,]*")
_MIN_OPENING_CHARS = 4
_MIN_UNIQUE_CHARS = 20
"""Of a message that breaks off so much at least is needed to know it; shorter beginnings are of several."""
_NEGATED = reading_pattern("evidence.negated")
_UNSAID = reading_pattern("evidence.unsaid")
_FAILED = reading_pattern("evidence.failed")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_FEWEST_WORDS_OF_SENTENCE = 12  # A line of code has fewer spaces between its words.
_MISSING = "90909090"  # Stands for a number of a known message that the line does not have.
_QUOTES_CAUSE = re.compile(r"original error: ?\w|RuntimeError\('|Worker failed with error")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One known message in a log: its figures, line, process and time."""

    id: str
    role: messages.Role
    line: int
    text: str
    """The line without colours."""
    facts: Mapping[str, messages.Value] = field(default_factory=dict)
    phase: str | None = None
    process: str = ""
    rank: int | None = None
    pid: int | None = None
    time: str = ""
    at: str = ""
    is_warning: bool = False
    """Logged as a warning, so the server continued."""
    is_told: bool = False
    """A failure told in prose, which stands before or after the log that it is about."""
    window: str = ""
    """The text from the match on, with the lines that follow, for a message that is wrapped over several lines."""

    def number(self, name: str) -> int | None:
        """The integer that the message states for the named group of its pattern; None where it states none."""
        value = self.facts.get(name)
        return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class LogPassage:
    """A line that contains a mark, and the lines after it."""

    line: LogLine
    following: tuple[str, ...] = ()
    """Unchanged lines of the log."""


def evidence_in(passage: LogPassage) -> list[Evidence]:
    """The known messages that begin in a passage's first line, without those that another there makes redundant."""
    line = passage.line
    first = line.text[:_WINDOW_CHARS].rstrip()
    # INFO messages have one line, and so has a word alone (a shell's `Killed`); errors may be wrapped or have several.
    wrapped = () if first.isalpha() or _SINGLE_LINE.search(line.raw[:200]) else passage.following
    following = (without_prefixes(server_text(raw)[:4000]).strip()[:1000] for raw in wrapped)
    window = " ".join((first, *following))[: 2 * _WINDOW_CHARS]
    head = line.raw[:200]
    is_informational = bool(_INFORMATIONAL.search(head))
    items: list[Evidence] = []
    for index in _message_pattern_set().matching(window):
        message = messages.message_patterns()[index]
        match = compiled(_message_pattern(message)).search(window)
        if match is None or match.start() >= max(len(first), 1):
            continue
        if message.role == "frame" and (_NO_TRACEBACK.search(head) or _QUOTING.search(first[:200])):
            continue
        if message.role == "frame" and message.pattern is None and _is_about_code(message, line):
            continue
        if is_informational and message.role in ("failure", "host", "exception"):
            continue
        if (is_told := message.role == "told" or message.id.endswith("_told")) and line.at:
            continue  # a logger's line is no prose
        is_prose = is_told or (message.id == "torch_oom_unsized" and not line.at)
        before = window[max(match.start() - 100, 0) : match.start()]
        if is_prose and (_NEGATED.search(before[-12:] + match[0]) or _UNSAID.search(before)):
            continue
        facts = messages.typed_groups({name: text for name, text in match.groupdict().items() if text is not None})
        items.append(
            Evidence(
                message.id,
                message.role,
                line.number,
                line.raw[:_KEPT_CHARS].strip(),
                facts,
                message.phase,
                line.process,
                line.rank,
                line.pid,
                line.time,
                line.at,
                bool(_WARNING.search(head)),
                _is_mention(message.role, line, match.start()),
                window[match.start() : match.start() + _KEPT_CHARS],
            )
        )
    items = [item if item.id != "exception" else _whole_message(item, first) for item in items]
    ids = {evidence.id for evidence in items}
    covered = {weak for strong, weaker in _COVERED_BY.items() if strong in ids for weak in weaker}
    if any(evidence.role in ("failure", "host") for evidence in items):
        covered.add("exception")
    if ids.intersection(_SECONDARY_FAILURES) and not any(_QUOTES_CAUSE.search(evidence.window) for evidence in items):
        covered.add("exception")
    banner = "server_banner" in ids  # printed settings may name functions that are not running
    return [evidence for evidence in items if evidence.id not in covered and not (banner and evidence.role == "frame")]


def _is_mention(role: messages.Role, line: LogLine, start: int) -> bool:
    """Whether the message at column `start` is only part of a sentence or title, rather than logged there."""
    if role == "milestone":
        return not line.at and not line.process and line.text[:start].count(" ") >= _FEWEST_WORDS_BEFORE
    return role == "told" or (role == "failure" and _TITLE.match(line.raw) is not None)


def _is_about_code(message: messages.MessagePattern, line: LogLine) -> bool:
    """Whether a sentence names a function of the start-up without saying that anything failed there."""
    if line.at or line.process or line.rank is not None or not (message.phase or "").startswith("startup"):
        return False
    is_prose = line.text.count(" ") >= _FEWEST_WORDS_OF_SENTENCE and 'File "' not in line.text
    marks = [mark for mark in message.marks if mark in line.text]
    named = [sentence for sentence in _SENTENCE_END.split(line.text) if any(mark in sentence for mark in marks)]
    is_code = line.text.startswith(("    ", "\t")) or any(" " in mark for mark in marks)
    return is_prose and not is_code and not any(map(_FAILED.search, named))


_FEWEST_WORDS_BEFORE = 4
"""A bullet, a label or a time of another logger stands before a pasted line; a sentence has more words."""

_COVERED_BY = messages.covered_messages()  # Messages that say less than another of the same line, by the other's id.
_SECONDARY_FAILURES = ("echo", "engine_start_failed", "engine_dead")
"""Exceptions that only report the failure of another process."""


def is_truncated_error(message: str) -> bool:
    """Whether a message is a decisive error's text or the beginning of one (four characters or more)."""
    opening = " ".join(_NUMBER.sub("#", message).split())
    return len(opening) >= _MIN_OPENING_CHARS and any(
        whole.startswith(opening) for whole in messages.message_openings()
    )


def _whole_message(error: Evidence, line: str) -> Evidence:
    """The error as the only known failure whose text begins like the cut-off `line`, with its figures; else as is."""
    given = line.partition(str(error.facts.get("type")))[2].lstrip(":( ").rstrip()
    opening = " ".join(_NUMBER.sub("#", given).split())
    found: dict[str, tuple[messages.MessagePattern, dict[str, messages.Value]]] = {}
    for whole in messages.message_openings() if len(opening) >= _MIN_UNIQUE_CHARS else ():
        completed = given + whole[len(opening) :].replace("#", _MISSING)
        for index in _message_pattern_set().matching(completed) if whole.startswith(opening) else ():
            message = messages.message_patterns()[index]
            match = compiled(_message_pattern(message)).search(completed)
            if match is not None and message.role == "failure":
                groups = {name: text for name, text in match.groupdict().items() if text and _MISSING not in text}
                cut = {name for name, text in groups.items() if given.endswith(text)}
                facts = messages.typed_groups({name: text for name, text in groups.items() if name not in cut})
                found.setdefault(message.id, (message, facts))
    covered = {weak for strong, weaker in _COVERED_BY.items() if strong in found for weak in weaker}
    if len(left := [pair for id_, pair in found.items() if id_ not in covered]) != 1:
        return error
    message, facts = left[0]
    return replace(error, id=message.id, role=message.role, phase=message.phase, facts=facts)


def sizes_bytes(texts: Iterable[str]) -> tuple[int, ...]:
    """The sizes such as `1.96 GiB` in bytes; texts that are no size are left out."""
    sizes = []
    for text in texts:
        with suppress(ValueError, OverflowError):
            sizes.append(messages.size_bytes(text))
    return tuple(sizes)


@cache
def _message_pattern_set() -> PatternSet:
    """All message patterns as one set, with the literal text that must occur in a matching line."""
    return PatternSet((_message_pattern(message), message.marks) for message in messages.message_patterns())


@cache
def _message_pattern(message: messages.MessagePattern) -> str:
    """The regular expression of a known message, or if it has none one that finds its literal texts (`marks`)."""
    return message.pattern or "|".join(escaped(mark) for mark in message.marks)


@dataclass(frozen=True, slots=True)
class TorchOom:
    """One failed allocation as torch reports it. None: not printed, or printed as zero, as containers do."""

    line: int
    wanted_bytes: int
    platform: str = "CUDA"
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    """What this process holds, torch's and other memory."""
    others_bytes: tuple[int, ...] = ()
    """What other processes hold; in a container the job itself may be listed as one."""
    torch_bytes: int | None = None
    pools_bytes: int = 0
    """In private pools: CUDA graphs, or the sleep-mode allocator."""
    unallocated_bytes: int | None = None
    """Reserved by torch but not allocated."""
    allowed_bytes: int | None = None
    other_pids: tuple[int, ...] = ()
    """Of the processes of `others_bytes`, in the same order; empty where not all are printed."""


def parse_torch_oom(evidence: Evidence) -> TorchOom | None:
    """The figures of torch's out-of-memory message, in any release's wording; None if it does not state the request."""
    wanted = evidence.facts.get("wanted_bytes")
    if not isinstance(wanted, int):
        return None
    window = evidence.window[:1600]
    # Stops before a second OOM message with its own numbers.
    again = window.find("Tried to allocate", window.find("Tried to allocate") + 1)
    window = window[:again] if again > 0 else window
    numbers: dict[str, int] = {}
    for pattern in read_data("evidence.json")["oom_parts"]:  # old and new wordings
        match = compiled(pattern).search(window)
        if match:
            for name, value in messages.typed_groups(match.groupdict()).items():
                if isinstance(value, int):
                    numbers.setdefault(name, value)
    listed = tuple(compiled(read_data("evidence.json")["oom_process"]).finditer(window))
    others = sizes_bytes(match["used_size"] for match in listed)
    pids = tuple(int(match["pid"]) for match in listed) if len(others) == len(listed) and all(others) else ()
    reserved, torch = numbers.get("reserved_bytes"), numbers.get("torch_bytes")
    unallocated = numbers.get("unallocated_bytes")
    if unallocated is None and reserved is not None and torch is not None:
        unallocated = max(reserved - torch, 0)
    if (largest := numbers.get("largest_bytes")) and "free_bytes" in numbers:  # XLA prints free memory's largest piece
        unallocated, numbers["free_bytes"] = max(numbers["free_bytes"] - largest, 0), largest
    return TorchOom(
        evidence.line,
        wanted,
        "TPU" if window.startswith("Attempting to") else str(evidence.facts.get("platform", "CUDA")),
        numbers.get("gpu_count"),
        numbers.get("total_bytes"),
        numbers.get("free_bytes"),
        numbers.get("own_bytes") or None,
        tuple(value for value in others if value),
        torch,
        numbers.get("pools_bytes", 0),
        unallocated,
        numbers.get("allowed_bytes"),
        pids,
    )
