"""GPU memory grows over hours or days."""

from collections.abc import Sequence
from typing import ClassVar

from legroom.live.detectors.base import AT_ONCE, GOOD, Condition, Detector, worst_condition
from legroom.live.forecast import trend
from legroom.live.metrics.window import MemoryPoint, Window
from legroom.units import human_bytes

_HOUR_S = 3600.0
_MIN_POINTS = 12  # An hour at one point in five minutes.
_GAP_S = 1800.0  # A gap of six points: the server may have been another one before it.

MemorySeries = tuple[Sequence[tuple[float, float]], str]
"""(time, bytes) points and a phrase that names them."""


class MemoryCreep(Detector):
    """Theil-Sen slope of used GPU memory, or of the bytes that PyTorch reserves in the workers."""

    kind = "memory_creep"
    title = "GPU memory grows while it serves"
    cause = "leak_over_time"
    entry = "LR405"
    situation = "chronic"
    restart_helps = True
    begins_after = AT_ONCE
    """The slope already covers hours."""
    of_gpus: ClassVar[bool] = True
    """Whether the plan's GPUs are what fills up."""

    _seen: tuple[int, float] = (0, 0.0)
    _last: Condition | None = None

    @property
    def warm_up_s(self) -> float:
        """The hours that a slope needs, plus the longest gap between points, in seconds."""
        return self.levels.creep_least_hours * _HOUR_S + _GAP_S

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where memory rises clearly, by a slope fitted whenever a point is added; None with too few points."""
        since_s = window.restarts[-1] if window.restarts else 0.0
        points = [point for point in window.points if point.time_s >= since_s]
        # No slope is fitted across a gap in time.
        begins = [late for late in range(1, len(points)) if points[late].time_s - points[late - 1].time_s > _GAP_S]
        points = points[begins[-1] :] if begins else points
        if not points:
            return None
        state = len(points), points[-1].time_s
        if state != self._seen:
            conditions = [self._slope_condition(series, of) for series, of in self.series(points)]
            self._seen, self._last = state, worst_condition([condition for condition in conditions if condition])
        return self._last

    def series(self, points: list[MemoryPoint]) -> Sequence[MemorySeries]:
        """[((time, bytes) points, what they are)]: reserved by workers or, if that has more points, used on GPUs."""
        used = [(point.time_s, float(point.memory_used_bytes)) for point in points if point.memory_used_bytes]
        reserved = [(point.time_s, float(point.reserved_bytes)) for point in points if point.reserved_bytes]
        by_workers = len(reserved) >= len(used)
        return [(reserved, "reserved by the workers") if by_workers else (used, "used on the GPUs")]

    def _slope_condition(self, series: Sequence[tuple[float, float]], label: str) -> Condition | None:
        """Bad where (time, bytes) points rise clearly and fast; `label`: for the text; None if too few or short."""
        levels = self.levels
        hours = (series[-1][0] - series[0][0]) / _HOUR_S if series else 0.0
        if hours < levels.creep_least_hours or len(series) < _MIN_POINTS:
            return None
        line = trend(series)
        if line is None:
            return None
        per_h = line.slope * _HOUR_S
        if per_h < levels.creep_bytes_per_h or line.rising < levels.creep_share_ratio or line.low <= 0:
            return GOOD
        reason = f"memory {label} grew from {human_bytes(int(series[0][1]))} to {human_bytes(int(series[-1][1]))} in "
        reason += f"{hours:.1f} h, {human_bytes(int(per_h))} an hour"
        numbers = {"bytes_per_h": per_h, "hours": hours, "bytes": series[-1][1]}
        total = self.plan.gpu.total_bytes * (self.plan.gpu.count or 1) if self.plan and self.of_gpus else 0
        if total > series[-1][1]:
            left_h = numbers["hours_left"] = (total - series[-1][1]) / per_h
            reason += f"; at this slope the card is full in {left_h:.0f} h"
        return Condition(True, reason, numbers)
