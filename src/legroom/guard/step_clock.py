"""How many steps the engine made since some moment: how far an answer has come that is not a stream.

A sequence makes a token a step, and the engine counts its steps. Between looks, and since the last one, they are taken
to pass evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

MOST_LOOKS = 256
LONGEST_GAP_S = 3.0
"""Between looks: nobody waited in between, and the engine may have been idle."""
RATE_S = 1.0
"""Over how long the rate is averaged: in one look the prompts of many newcomers may have been computed."""


class StepClock:
    __slots__ = ("_looks", "rate")

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque(maxlen=MOST_LOOKS)
        self.rate = 0.0
        """Steps a second lately; 0 where nothing is known."""

    def learn(self, steps: float, now_s: float) -> None:
        looks = self._looks
        if looks and not (steps >= looks[-1][1] and 0 < now_s - looks[-1][0] <= LONGEST_GAP_S):
            looks.clear()
            self.rate = 0.0
        looks.append((now_s, steps))
        for at_s, before in reversed(looks):
            if now_s - at_s >= RATE_S or (at_s, before) == looks[0]:
                self.rate = (steps - before) / (now_s - at_s) if now_s > at_s else 0.0
                break

    def steps_since(self, since_s: float, now_s: float) -> float | None:
        """None where the engine does not say, or has not lately."""
        if not self.rate or now_s - self._looks[-1][0] > LONGEST_GAP_S:
            return None
        return max(0.0, self._at(now_s) - self._at(since_s))

    def _at(self, moment_s: float) -> float:
        looks = self._looks
        after = bisect_right(looks, (moment_s, float("inf")))
        if after in (0, len(looks)):
            at_s, steps = looks[0 if not after else -1]
            return steps + self.rate * (moment_s - at_s)
        (at_s, steps), (then_s, more) = looks[after - 1], looks[after]
        return steps + (more - steps) * (moment_s - at_s) / (then_s - at_s)
