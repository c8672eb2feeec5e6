"""How many steps the engine made since some moment: how far an answer has come that is not a stream.

A sequence makes a token a step, and the engine counts its steps. Between looks they are taken to pass evenly. Only
those that a look has confirmed count for a request, and a few since: the engine may compute prompts all the while.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

MOST_LOOKS = 256
LONGEST_GAP_S = 3.0
"""Between looks: nobody waited in between, and the engine may have been idle."""
RATE_S = 0.4
"""Over how long the rate is averaged."""
LONGEST_AHEAD_S = 0.5
"""Since the last look, for which steps are reckoned."""


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
        """None where the engine does not say."""
        if not self._looks:
            return None
        looked_s, steps = self._looks[-1]
        if since_s >= looked_s:
            return 0.0
        return steps - self._at(since_s) + self.rate * min(LONGEST_AHEAD_S, max(0.0, now_s - looked_s))

    def _at(self, moment_s: float) -> float:
        """Before the last look; what was made before the first is not known."""
        looks = self._looks
        after = bisect_right(looks, (moment_s, float("inf")))
        if not after:
            return looks[0][1]
        (at_s, steps), (then_s, more) = looks[after - 1], looks[after]
        return steps + (more - steps) * (moment_s - at_s) / (then_s - at_s)
