"""Autoscaling thresholds for replicas of one server, from its start-up time and capacity. Until a new replica has
started, the KV caches of the others hold the growing load, so slow starts need a lower target utilization and a longer
scale-down window. Used by `export kubernetes --autoscale` and `simulate --autoscale`."""

import math
from dataclasses import asdict, replace
from typing import Any

from legroom.records import dataclass

SYNC_S = 15
"""The HorizontalPodAutoscaler's default sync period."""
REACTION_S = 3 * SYNC_S
"""From load to decision: scrape, poll and sync of 15 s each."""
DOUBLING_S = 3600
"""Assumed doubling time of the load: faster than the morning of a service with users in one time zone."""
FULL_RATIO = 0.95
"""KV cache usage that counts as full, as in the alerts."""
LEAST_TARGET_RATIO = 0.3
LEAST_WAITING = 4
"""The least waiting requests that count as a queue, as in the alerts."""
TOLERANCE = 0.1
"""The controller does not scale while the ratio to the target is within this of 1."""
_LONGEST_PERIOD_S, _LONGEST_WINDOW_S = 1800, 3600
"""Limits of the HorizontalPodAutoscaler API."""
_LEAST_PERIOD_S = 60
_LEAST_WINDOW_S = 900  # Replays of load on a few servers flapped with the five minutes that are Kubernetes' default.

_UP_SHARE = 8
"""The scale-up window is the start time over this. Without a window, replays of Azure's code completions took a third
more server hours; with a quarter of the start time, TTFT rose."""
_LEAST_UP_WINDOW_S = 2 * SYNC_S


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    least: int
    most: int
    start_s: float
    """Seconds from the decision to the first request of a new replica."""
    kv_target_ratio: float
    """Target of the average KV cache usage."""
    waiting_target: int
    """Target of the average number of waiting requests."""

    @property
    def scaling_period_s(self) -> int:
        """Seconds in which the HPA at most doubles the replicas or removes one: a new replica is ready by then."""
        return _clamped_seconds(self.start_s + REACTION_S, _LEAST_PERIOD_S, _LONGEST_PERIOD_S)

    @property
    def up_window_s(self) -> int:
        """Scale-up stabilization window in seconds, an eighth of the start time: shorter bursts add no replica."""
        return _clamped_seconds(self.start_s / _UP_SHARE, _LEAST_UP_WINDOW_S, _LONGEST_WINDOW_S)

    @property
    def down_window_s(self) -> int:
        """Scale-down stabilization window in seconds: twice the start time, from 15 minutes to an hour."""
        return _clamped_seconds(2 * self.start_s, _LEAST_WINDOW_S, _LONGEST_WINDOW_S)

    def sentence(self) -> str:
        """A sentence for comments in manifests that explains the thresholds by the start-up time."""
        serves_s = self.start_s + REACTION_S + self.up_window_s
        return (
            f"A new replica serves after about {serves_s:.0f} s. If load doubles within an hour, "
            f"pools at {self.kv_target_ratio:.0%} are {FULL_RATIO:.0%} full by then; a queue of {self.waiting_target} "
            "is what the room that is kept free takes in at once."
        )

    def to_json(self) -> dict[str, Any]:
        """JSON of the policy, with its windows and periods."""
        up = {"up_window_s": self.up_window_s, "up_period_s": self.scaling_period_s}
        down = {"down_period_s": self.scaling_period_s, "down_window_s": self.down_window_s}
        return {**asdict(self), "start_s": round(self.start_s, 1), **up, **down}


def scaling_policy(least: int, most: int, start_s: float, requests_at_once: float) -> ScalingPolicy:
    """The policy for `least` to `most` replicas that start in `start_s` and each hold `requests_at_once` requests."""
    policy = ScalingPolicy(least, most, start_s, FULL_RATIO, LEAST_WAITING)
    grown = 2.0 ** ((start_s + REACTION_S + policy.up_window_s) / DOUBLING_S)
    target = round(max(LEAST_TARGET_RATIO, FULL_RATIO / grown), 2)
    waiting = max(LEAST_WAITING, math.floor((1 - target) * requests_at_once))
    return replace(policy, kv_target_ratio=target, waiting_target=waiting)


def _clamped_seconds(seconds: float, least: int, most: int) -> int:
    """Seconds rounded up, but at least `least` and at most `most`."""
    return int(min(max(math.ceil(seconds), least), most))
