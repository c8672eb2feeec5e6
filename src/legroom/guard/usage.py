"""The `usage` of an answer, found in the bytes as they pass: nothing is held back or decoded."""

from __future__ import annotations

import re

_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')
_MARK = b'"usage"'
LONGEST_BYTES = 1024
"""How far behind the mark the numbers stand at most."""


def usage_in(chunk: bytes) -> tuple[int, int] | None:
    """Prompt and output tokens, where this piece of an answer names them."""
    at = chunk.rfind(_MARK)
    if at < 0:
        return None
    piece = chunk[at : at + LONGEST_BYTES]
    prompt = _PROMPT.search(piece)
    if prompt is None:
        return None
    output = _OUTPUT.search(piece)
    return int(prompt[1]), int(output[1]) if output else 0
