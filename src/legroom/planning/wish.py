"""What a user wants a server to hold."""

from __future__ import annotations

from legroom.planning.plan import Policy
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """What the server must hold: this many requests of this length at once, on one of these numbers of GPUs."""

    context: int
    concurrency: float = 1.0
    gpus: tuple[int, ...] = (1,)
    policy: Policy = "balanced"


def counts_up_to(most: int) -> tuple[int, ...]:
    """Powers of two below `most`, and `most` itself."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return tuple(counts) if most == 1 else (*counts, most)
