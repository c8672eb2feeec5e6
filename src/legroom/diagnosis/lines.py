"""One raw line of a log -> what was said, by which process, when: every wrapping that platforms add taken off."""

from __future__ import annotations

import json
import re

from legroom.records import dataclass

LONGEST_LINE = 64 * 1024
_JSON_MESSAGE_KEYS = ("message", "msg", "log", "MESSAGE", "text", "textPayload", "body", "event")
_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[A-Za-z]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

# Anchored at the start and without nested repetition, so `re` is linear on them.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d{4}-\d\d-\d\dT[\d:.,]{5,24}(?:Z|[+-]\d\d:?\d\d)? (?:stdout|stderr) [FP] ",  # containerd, CRI-O
        r"[\w./@-]{1,80}\s{0,8}\| ",  # docker compose
        r"\[pod/[^\]\s]{1,200}\] ",  # kubectl logs --prefix
        r"[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d \S{1,120} [\w./@:-]{1,80}(?:\[\d{1,9}\])?: ",  # journald, syslog
        r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]{0,10}(?:Z|[+-]\d\d:?\d\d)?\s",  # timestamps of platforms
        r"\(?[\w:.-]{1,60} ?(?:TP\d+ )?(?:rank=\d+ )?(?:pid=\d+)(?:, ip=[\d.]+)?\) ?",  # (EngineCore pid=1), Ray
        r"\((?:EngineCore|Worker|APIServer)\w{0,20}\) ",
        r"\[rank\d+\]:\s?",
        r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,3}\d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]{1,120}:\d+\] ?",
    )
)
_PROCESS = re.compile(r"\(?(?P<label>\w{1,40})(?: rank=(?P<rank>\d+))? ?(?:TP(?P<tp>\d+) )?pid=(?P<pid>\d+)")
_RANK = re.compile(r"\[rank(\d+)\]|Worker_(?:\w*_)?TP(\d+)|VllmWorker-(\d+)")
_VLLM_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_ISO_TIME = re.compile(r"\b\d{4}-(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_LOGGED_AT = re.compile(r"(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (\[?)([\w./]{1,80}\.py):(\d+)\]")
_PROMPT = re.compile(r"(?:Received request|Added request)[^\n]{0,120}?:? ?prompt:")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, out of its wrappings."""

    number: int
    raw: str
    """Without colours and out of a JSON envelope, prefixes kept: what a reader would recognise."""
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
    text = server_text(raw)
    head = text[:400]
    process = _PROCESS.search(head) if "pid=" in head else None
    rank = _RANK.search(head) if "rank" in head or "Worker" in head else None
    at = _LOGGED_AT.search(head)
    return LogLine(
        number,
        text,
        without_prefixes(text),
        process["label"] if process else "",
        _first_int(rank.groups()) if rank else (int(process["rank"]) if process and process["rank"] else None),
        int(process["pid"][:12]) if process else None,
        _time(head),
        f"{at[1]}{at[2].rpartition('/')[2]}" if at else "",
    )


def server_text(raw: str) -> str:
    """What the server said in a line: no colours, no JSON envelope, nothing of what users asked it, and nothing of what
    `legroom run` says beside it: a plan quotes the very error that it expects."""
    text = _unwrapped(raw[:LONGEST_LINE])
    if "legroom: " in text[:400] and without_prefixes(text[:400]).startswith("legroom: "):
        return ""
    if " request " in text[:400]:
        prompt = _PROMPT.search(text[:2000])
        if prompt:
            return text[: prompt.end()]
    return text


def without_prefixes(raw: str) -> str:
    """The text behind what platforms, executors and the logger put in front of it."""
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


def _unwrapped(raw: str) -> str:
    line = raw.rstrip("\r\n")
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    if "\r" in line:  # a progress bar rewrites its line; the last state is the one that stayed
        line = line.rpartition("\r")[2] or line
    stripped = line.strip()
    if stripped.startswith("{") and stripped.endswith("}"):
        line = _from_json(stripped) or line
    return _CONTROL.sub(" ", line) if _CONTROL.search(line) else line


def _from_json(text: str) -> str | None:
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
    return _COLOUR.sub("", message)


def _time(head: str) -> str:
    match = _VLLM_TIME.search(head)
    if match:
        return match[1]
    iso = _ISO_TIME.search(head)
    return f"{iso[1]} {iso[2]}" if iso else ""


def _first_int(groups: tuple[str | None, ...]) -> int | None:
    return next((int(group[:6]) for group in groups if group), None)
