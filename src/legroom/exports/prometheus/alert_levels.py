"""The thresholds and windows of the alerts, from the detectors, the plan and the options."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy.exported_server import checkpoint_bytes
from legroom.exports.deploy.serve_command import parse_command
from legroom.exports.deploy.start_times import DISK_BYTES_S, DOWNLOAD_BYTES_S, StartTimes
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass
from legroom.units import parse_seconds, parse_speed


@dataclass(frozen=True)
class AlertLevels:
    """The thresholds and times that only rules use; `detect` has those shared with the detectors of `legroom watch`.
    Times are real time; `speed_up` divides them when they are written."""

    detect: Thresholds = DEFAULT
    down_for_s: float = 120
    """A restart without large weights takes less: 25 s of imports, up to 71 s of engine start (`start_times.py`)."""
    start_limit_s: float = 600
    """Longer than a first start takes; a plan replaces it."""
    first_start_limit_s: float = 3600
    """Twice what a first start of 110 GB takes that come over a gigabit line; a plan replaces it."""
    crash_window_s: float = DEFAULT.crash_over_s
    """The window of a restart loop; a plan lengthens it, as a slow load leaves no time for so many starts in it."""
    unexplained_restarts: int = 5
    """More than a rollout makes. Kubernetes' doubling back-off leaves time for five short starts in 15 minutes."""
    failed_ratio: float = 0.5
    """The share of failed requests above which the server itself fails."""
    failed_least_per_s: float = 1 / 60
    """One a minute; below it a ratio is of one or two requests."""
    missing_ratio: float = 0.5
    """The share of the targets an hour ago, where kube-state-metrics shows no scale-down."""
    missing_for_s: float = 300
    """A restarted Prometheus has no targets for a while."""
    rate_window_s: float = 120
    """Eight scrapes at the usual 15 s, two at 60 s: a rate needs two."""
    traffic_least: float = 10
    """Requests that are expected in the window: one a minute."""
    ttft_p99_s: float | None = None
    """None: compare with the server's own previous day."""
    inter_token_p99_s: float | None = None
    latency_factor: float = 3.0
    """Larger than the variation within a day."""
    latency_quantile: float = 0.99
    """Of a day's p99s: leaves out a quarter of an hour. Measured on 27 simulated days of a server with 16 sequences and
    Poisson arrivals: 5 false alarms, with the median 139."""
    latency_history_s: float = 4 * 3600
    """A day of less than three hours, the last one left out, has not seen what is usual."""
    ttft_floor_s: float = 1.0
    """A first token within a second is no problem."""
    inter_token_floor_s: float = 0.1
    """Ten tokens a second: faster than people read."""
    latency_window_s: float = 600
    latency_for_s: float = 300
    latency_least: int = 20
    """The p99 of fewer requests is their maximum."""
    guard_for_s: float = 300
    drain_for_s: float = 900
    """Longer than the longest requests: the drain was forgotten."""
    speed_up: float = 1.0

    def time(self, real_s: float) -> str:
        """`real_s` seconds divided by `speed_up`, as Prometheus writes durations."""
        return duration(real_s / self.speed_up)


def duration(seconds: float) -> str:
    """A duration in Prometheus' notation: `5m`, `1h30m`."""
    left = max(1, round(seconds * 1000))
    words = ""
    for unit, size in (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        words += f"{count}{unit}" if count else ""
    return words


def levels_for(plan: PlanDocument | None, options: Mapping[str, Any]) -> AlertLevels:
    """Thresholds from the options; a plan's start time sets the startup limit and the crash window."""
    levels = AlertLevels(
        ttft_p99_s=parse_seconds(options.get("ttft_p99"), "--ttft-p99"),
        inter_token_p99_s=parse_seconds(options.get("inter_token_p99"), "--inter-token-p99"),
        speed_up=_parsed_speed_up(options.get("speed_up")),
    )
    disk_bytes_s = parse_speed(options.get("disk_speed"), "--disk-speed", DISK_BYTES_S)
    if plan is None:
        return levels
    # Without the download of a first start, which would delay the report of an outage.
    start = StartTimes(checkpoint_bytes(plan, parse_command(plan.command, plan.release)), disk_bytes_s, 0)
    # One start more than the counted restarts, for the time served before the first.
    window_s = max(levels.crash_window_s, (levels.unexplained_restarts + 1) * start.expected_s)
    first_s = replace(start, download_bytes_s=DOWNLOAD_BYTES_S).limit_s
    window_s = math.ceil(window_s / 60) * 60
    return replace(levels, start_limit_s=start.limit_s, first_start_limit_s=first_s, crash_window_s=window_s)


def _parsed_speed_up(text: str | None) -> float:
    """The factor of --speed-up, which divides all durations; 1.0 if not given, LegroomError if out of range."""
    if text is None:
        return 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= 60:
        hint = "write it like --speed-up 20"
        raise LegroomError(f"--speed-up {text!r} is not a factor from 1 to 60", hint)
    return factor
