"""ShareGPT: a JSON list of conversations. The first question and its answer are one request, as in vLLM's benchmark."""

import json
from collections.abc import Iterable
from typing import Any

from legroom.errors import LegroomError
from legroom.simulation.trace import Trace

CHARACTERS_PER_TOKEN = 4
"""English text with the tokenizers of current models; an estimate."""


def looks_like(head: str) -> bool:
    """Whether the file begins with a JSON array of objects with "conversations"."""
    return head.lstrip().startswith("[") and '"conversations"' in head


def read(lines: Iterable[str], name: str) -> Trace:
    """A request per conversation (its first two turns), lengths estimated, all at once; LegroomError if not JSON."""
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
