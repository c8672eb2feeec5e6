"""How fast blocks and seats come back, and when there will be enough for one more."""

from __future__ import annotations

import math

RATE_WINDOW_S = 10.0
"""Over how long the rate of releases is averaged: a few requests of ordinary length."""


class Supply:
    """Blocks or seats on their way back: how fast they come, and who is to have them."""

    __slots__ = ("_promised", "_promised_at_s", "queued", "rate")

    def __init__(self, now_s: float) -> None:
        self.rate = ReleaseRate(now_s)
        self.queued = 0
        self._promised = 0.0
        self._promised_at_s = now_s

    def wait_s(self, need: int, free: int, now_s: float, behind_queue: bool = True) -> float | None:
        """When so many will be free, behind all that were told to come back and, for a newcomer, all that wait; None
        where nothing is known. Who gives up waiting came before those who still do: counting these, too, would send
        all that give up together back in the same second.
        """
        rate = self.rate.per_s(now_s)
        if rate <= 0:
            return None
        self._promised = max(0.0, self._promised - rate * (now_s - self._promised_at_s))
        self._promised_at_s = now_s
        missing = (self.queued if behind_queue else 0) + self._promised + need - max(0, free)
        self._promised += need
        return missing / rate


class ReleaseRate:
    """What was given back a second, an exponential average without the bias of a short history."""

    __slots__ = ("_at_s", "_mass", "_weight")

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._mass = 0.0
        self._weight = 0.0

    def add(self, amount: int, now_s: float) -> None:
        self._decay(now_s)
        self._mass += amount

    def per_s(self, now_s: float) -> float:
        """The rate as of now; 0 where nothing was released lately."""
        self._decay(now_s)
        return self._mass / (self._weight * RATE_WINDOW_S) if self._weight > 0.01 else 0.0

    def _decay(self, now_s: float) -> None:
        kept = math.exp(-max(0.0, now_s - self._at_s) / RATE_WINDOW_S)
        self._at_s = max(now_s, self._at_s)
        self._mass *= kept
        self._weight = 1.0 - (1.0 - self._weight) * kept
