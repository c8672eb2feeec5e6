"""The made-up token ids of a trace that only tells lengths and shared prefixes.

The scheduler never looks at a token, but the prefix cache compares blocks of them. A prompt is its prefix's
stream up to `prefix_len`, then a stream of its own; every sampled token is the same one. Two requests of one
prefix share exactly the blocks that both prompts cover.
"""

from __future__ import annotations

import random

from legroom.simulation.trace import TraceRequest

SAMPLED_TOKEN = 7
_VOCABULARY = range(10, 2000)


def stream(name: str, length: int) -> list[int]:
    """The first `length` tokens of a named stream: a longer read of a stream begins with the shorter one."""
    return random.Random(name).choices(_VOCABULARY, k=length) if length else []


def prompt_tokens(request: TraceRequest) -> list[int]:
    """The whole prompt."""
    shared = [token for name, start, end in request.prefix for token in stream("P" + name, end)[start:]]
    return shared + stream("U" + request.id, request.prompt_len - len(shared))


class BlockHasher:
    """Names the content of a block: equal names mean equal tokens from the start of the sequence on."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def extend(self, hashes: list[int], tokens: list[int]) -> None:
        """Name every full block of `tokens` that `hashes` does not name yet."""
        while (len(hashes) + 1) * self.block_size <= len(tokens):
            start = len(hashes) * self.block_size
            content = (hashes[-1] if hashes else -1, tuple(tokens[start : start + self.block_size]))
            hashes.append(self._names.setdefault(content, len(self._names)))
