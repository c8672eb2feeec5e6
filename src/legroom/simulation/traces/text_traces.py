"""Traces with texts in place of lengths, which are estimated: ShareGPT and the log of a vLLM server."""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace

CHARACTERS_PER_TOKEN = 4
"""English text with the tokenizers of current models; an estimate."""


def is_sharegpt(head: str) -> bool:
    """Whether `head`, a file's beginning, is that of a JSON array of objects with "conversations"."""
    return head.lstrip().startswith("[") and '"conversations"' in head


def read_sharegpt(lines: Iterable[str], name: str) -> Trace:
    """A request per conversation (its first two turns, as in vLLM's benchmark), all at once; or LegroomError."""
    try:
        conversations = json.loads("".join(lines))
    except json.JSONDecodeError as error:
        raise LegroomError(f"{name} is not JSON: {error.msg} in line {error.lineno}") from None
    trace = Trace(name)
    for conversation in conversations:
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if isinstance(turns, list) and len(turns) >= 2:
            trace.add(_estimated_tokens(turns[0]), _estimated_tokens(turns[1]))
    return trace


def _estimated_tokens(turn: Any) -> int:
    """Tokens of one conversation turn, estimated from its characters; at least 1."""
    text = turn.get("value") if isinstance(turn, dict) else None
    return max(1, len(str(text or "")) // CHARACTERS_PER_TOKEN)


_RECEIVED = re.compile(r"Received request (?P<id>[^\s:]+):")
_STAMP = re.compile(r"(?:(?P<year>\d{4})-)?(?P<month>\d\d)-(?P<day>\d\d)[ T](?P<time>\d\d:\d\d:\d\d)")
_MAX_TOKENS = re.compile(r"\bmax_tokens=(\d+)")
_TOKEN_IDS = re.compile(r"prompt_token_ids: \[([\d,\s]*)\]")
_PROMPT = re.compile(r"prompt: (['\"])(?P<text>.*?)\1, (?:params|sampling_params|prompt_token_ids)", re.DOTALL)


def is_vllm_log(head: str) -> bool:
    """Whether `head`, a file's beginning, has a `Received request` line (of vLLM with --enable-log-requests)."""
    return _RECEIVED.search(head) is not None


def read_vllm_log(lines: Iterable[str], name: str) -> Trace:
    """The requests in a vLLM log that state `max_tokens`, taken as their output length, which no log states."""
    trace = Trace(name, in_seconds=True)
    start: float | None = None
    for line in lines:
        received = _RECEIVED.search(line)
        limit = _MAX_TOKENS.search(line)
        if not received or not limit:
            continue
        at = _line_time_s(line)
        start = at if start is None else start
        trace.add(_prompt_len(line), int(limit[1]), max(0.0, at - start), request_id=received["id"])
    return trace


def _prompt_len(line: str) -> int:
    """Prompt tokens: the count of logged token ids, otherwise estimated from the logged text; at least 1."""
    ids = _TOKEN_IDS.search(line)
    if ids and ids[1].strip():
        return ids[1].count(",") + 1
    prompt = _PROMPT.search(line)
    return max(1, len(prompt["text"]) // CHARACTERS_PER_TOKEN) if prompt else 1


def _line_time_s(line: str) -> float:
    """Unix seconds of a log line's local time; of the year 2000 if it states none; 0.0 without a time."""
    stamp = _STAMP.search(line)
    if not stamp:
        return 0.0
    year = stamp["year"] or "2000"
    return datetime.fromisoformat(f"{year}-{stamp['month']}-{stamp['day']}T{stamp['time']}").timestamp()
