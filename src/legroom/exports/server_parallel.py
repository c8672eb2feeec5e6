"""How much of a server that is spread over several machines the exported one is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legroom.exports.server_words import ServerWords


def copies_here(words: ServerWords, engines: int) -> int:
    """Data-parallel copies that this machine runs; 0 where it only takes requests for others."""
    local = _count(words, "--data-parallel-size-local")
    return engines if local is None else local


def ranks_here(words: ServerWords, args: Mapping[str, Any]) -> int:
    """GPUs of one copy on this machine."""
    sizes = (int(args.get(f"{what}_parallel_size") or 1) for what in ("tensor", "pipeline", "prefill_context"))
    return max(1, math.prod(sizes) // (_count(words, "--nnodes") or 1))


def _count(words: ServerWords, flag: str) -> int | None:
    phrase = words.get(flag)
    return int(phrase.value) if phrase and phrase.value.isascii() and phrase.value.isdigit() else None
