"""The numbers of the alerts: from the detectors' thresholds, the plan, and what the user asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.errors import LegroomError
from legroom.exports.deploy.server import checkpoint_bytes
from legroom.exports.deploy.times import DISK_BYTES_S, StartTimes
from legroom.exports.deploy.words import take_apart
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.records import dataclass
from legroom.units import parse_seconds, parse_speed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from legroom.planning.plan_document import PlanDocument

MOST_SPEED_UP = 60.0


@dataclass(frozen=True)
class AlertLevels:
    """Every level and time of the alerts. Times are real time; `speed_up` divides them when they are written.

    What a detector of `legroom watch` also looks at is in its thresholds; here is what only a rule needs.
    """

    detect: Thresholds = DEFAULT
    down_for_s: float = 600
    """Longer than a start takes; a plan says how long that is."""
    crash_window_s: float = DEFAULT.crash_over_s
    """Within which so many restarts are a loop. A plan makes it as long as they take: a server that loads for seven
    minutes never starts three times in fifteen."""
    failed_ratio: float = 0.5
    """Of all requests that end: above it the server fails rather than single requests."""
    failed_least_per_s: float = 1 / 60
    """One a minute: below it, a ratio is of one or two requests."""
    missing_ratio: float = 0.5
    """Of the targets an hour ago: a fleet that is scaled gives up one by one, not half of it within the hour."""
    missing_for_s: float = 300
    """A Prometheus that starts over knows nobody for a while."""
    rate_window_s: float = 120
    """Eight scrapes at the usual 15 s, two at 60 s: a rate needs two."""
    traffic_least: float = 10
    """Requests that would be usual while none came: one a minute."""
    ttft_p99_s: float | None = None
    """None: no target was named; compared with the server's own day before."""
    inter_token_p99_s: float | None = None
    latency_factor: float = 3.0
    """More than the swing between a quiet and a busy hour of one day."""
    ttft_floor_s: float = 1.0
    """Below a second nobody complains, whatever it was yesterday."""
    inter_token_floor_s: float = 0.1
    """Ten tokens a second: faster than people read."""
    latency_window_s: float = 600
    latency_for_s: float = 300
    latency_least: int = 20
    """A percentile over fewer requests is their maximum by another name."""
    guard_turned_away_ratio: float = 0.05
    """One request in twenty: above it the guard is where the service is lost."""
    guard_for_s: float = 300
    drain_for_s: float = 900
    """A drain ends with the longest running request; one that lasts a quarter of an hour was forgotten."""
    speed_up: float = 1.0

    @property
    def preemptions_least_per_s(self) -> float:
        """Below it, preemptions are chance."""
        return self.detect.preemptions_least / self.detect.preemption_over_s

    @property
    def critical_for_s(self) -> float:
        """Pressure first, then a queue that stays."""
        return self.detect.alert_pool_for_s + self.detect.alert_queue_for_s

    def time(self, seconds: float) -> str:
        """A duration as Prometheus writes it."""
        return duration(seconds / self.speed_up)


def duration(seconds: float) -> str:
    """`5m`, `1h30m`, `90s`: as short as it is exact, to the millisecond."""
    left = max(1, round(seconds * 1000))
    words = ""
    for unit, size in (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        words += f"{count}{unit}" if count else ""
    return words


def levels_for(plan: PlanDocument | None, options: Mapping[str, Any]) -> AlertLevels:
    levels = AlertLevels(
        ttft_p99_s=parse_seconds(options.get("ttft_p99"), "--ttft-p99"),
        inter_token_p99_s=parse_seconds(options.get("inter_token_p99"), "--inter-token-p99"),
        speed_up=_speed_up(options.get("speed_up")),
    )
    disk_bytes_s = parse_speed(options.get("disk_speed"), "--disk-speed", DISK_BYTES_S)
    if plan is None:
        return levels
    checkpoint = checkpoint_bytes(plan, take_apart(plan.command, plan.release))
    # Not a first start, which also downloads: nobody would hear of an outage for as long.
    start = StartTimes(checkpoint, disk_bytes_s, 0)
    # One more than the restarts: between two of them lies a start, and before the first some serving.
    window_s = max(levels.crash_window_s, (levels.detect.crash_restarts + 1) * start.expected_s)
    return replace(levels, down_for_s=start.limit_s, crash_window_s=math.ceil(window_s / 60) * 60)


def _speed_up(text: str | None) -> float:
    if text is None:
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MOST_SPEED_UP:
        raise LegroomError(
            f"--speed-up {text!r} is not a factor from 1 to {MOST_SPEED_UP:g}", "write it like --speed-up 20"
        )
    return factor
