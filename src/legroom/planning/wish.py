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
