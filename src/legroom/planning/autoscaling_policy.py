"""When a fleet of equal servers should grow and shrink: thresholds read off the plan of one of them.

A new replica serves only after its start, so the pools of the others must have room for what arrives until then. The
more slowly a server starts, the emptier the pools are kept and the longer a replica is kept before it is given up.
What is computed here is what `legroom export kubernetes --autoscale` writes, and `legroom simulate --autoscale`
replays.
"""

from __future__ import annotations

import math
from typing import Any

from legroom.records import dataclass

SYNC_S = 15
"""Between two decisions: the default of the HorizontalPodAutoscaler's controller."""
REACTION_S = 45
"""From load to decision: a scrape of 15 s, a poll of 15 s, a decision of 15 s."""
DOUBLING_S = 3600
"""How fast load is assumed to double: steeper than the morning of a service with users in one time zone. A burst that
is faster is for the queue, not for a replica that comes when it is over."""
FULL_RATIO = 0.95
"""Where the pool counts as full, as for the alerts."""
LEAST_TARGET_RATIO = 0.3
LEAST_WAITING = 4
"""Fewer are no queue, however slow the server: the level of the alerts."""
TOLERANCE = 0.1
"""The controller leaves things as they are while the ratio to the target is within this of 1."""
_LONGEST_PERIOD_S, _LONGEST_WINDOW_S = 1800, 3600
"""What the API of the HorizontalPodAutoscaler allows."""
_LEAST_PERIOD_S = 60
_LEAST_WINDOW_S = 900
"""Also where a server starts within a minute: load on a few servers swings by chance for longer than the five minutes
that Kubernetes waits by default, and replays of such load flapped."""

_UP_SHARE = 8
"""Of a start: so much later a replica comes. Without waiting, replays of Azure's hour of code completions flapped and
took a third more server hours; with a quarter of a start, first tokens came much later."""
_LEAST_UP_WINDOW_S = 2 * SYNC_S


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    least: int
    most: int
    start_s: float
    """From the decision to the first request that a new replica takes."""
    kv_target_ratio: float
    """KV use of the average replica that is aimed at."""
    waiting_target: int
    """Waiting requests of the average replica above which there are too few."""

    @property
    def up_period_s(self) -> int:
        """The fleet at most doubles in this time: what was added must serve before it is judged too little."""
        return _within(self.start_s + REACTION_S, _LEAST_PERIOD_S, _LONGEST_PERIOD_S)

    @property
    def up_window_s(self) -> int:
        """Load must last so long before a replica is asked for: a burst is over when that would serve."""
        return _up_window_s(self.start_s)

    @property
    def down_period_s(self) -> int:
        """One replica is given up in this time."""
        return self.up_period_s

    @property
    def down_window_s(self) -> int:
        """A replica is given up when it was not needed for this long: twice what it costs to get it back."""
        return _within(2 * self.start_s, _LEAST_WINDOW_S, _LONGEST_WINDOW_S)

    def sentence(self) -> str:
        """The working of the thresholds."""
        serves_s = self.start_s + REACTION_S + self.up_window_s
        return (
            f"A new replica serves after about {serves_s:.0f} s. If load doubles within an hour, "
            f"pools at {self.kv_target_ratio:.0%} are {FULL_RATIO:.0%} full by then; a queue of {self.waiting_target} "
            "is what the room that is kept free takes in at once."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "least": self.least,
            "most": self.most,
            "start_s": round(self.start_s, 1),
            "kv_target_ratio": self.kv_target_ratio,
            "waiting_target": self.waiting_target,
            "up_window_s": self.up_window_s,
            "up_period_s": self.up_period_s,
            "down_period_s": self.down_period_s,
            "down_window_s": self.down_window_s,
        }


def scaling_policy(least: int, most: int, start_s: float, requests_at_once: float) -> ScalingPolicy:
    """The policy for servers that start in `start_s` and hold so many requests of the full length."""
    grown = 2.0 ** ((start_s + REACTION_S + _up_window_s(start_s)) / DOUBLING_S)
    target = round(max(LEAST_TARGET_RATIO, FULL_RATIO / grown), 2)
    waiting = max(LEAST_WAITING, math.floor((1 - target) * requests_at_once))
    return ScalingPolicy(least, most, start_s, target, waiting)


def _up_window_s(start_s: float) -> int:
    return _within(start_s / _UP_SHARE, _LEAST_UP_WINDOW_S, _LONGEST_WINDOW_S)


def _within(seconds: float, least: int, most: int) -> int:
    return int(min(max(math.ceil(seconds), least), most))
