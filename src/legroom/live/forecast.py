"""When the pool will be full, if what it does now goes on."""

from __future__ import annotations

from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.live.trend import trend
from legroom.live.window import Window
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """A full pool ahead."""

    full_in_s: float
    earliest_s: float
    latest_s: float | None
    """None where the slowest slope the points allow takes longer than a trend lasts."""
    per_minute: float
    """Growth of the pool's use a minute, 0..1."""
    engine: str = ""

    @property
    def text(self) -> str:
        """`pool full in ~4 min at this trend`."""
        return f"pool full in ~{_duration(self.full_in_s)} at this trend"


def forecast(window: Window, levels: Thresholds = DEFAULT) -> Forecast | None:
    """The earliest full pool among the engines; None without a clear upward trend, or where it is full already."""
    if not window.is_answering:
        return None
    # One interval more than the steps that are needed, because looks come a little late.
    enough_s = (levels.forecast_least_steps + 1) * (window.interval_s or 0.0)
    steps = window.recent(max(levels.forecast_over_s, enough_s))
    if len(steps) < levels.forecast_least_steps:
        return None
    found = []
    for key in {engine.key for engine in steps[-1].engines}:
        points = [
            (step.time_s, engine.kv_use)
            for step in steps
            for engine in step.engines
            if engine.key == key and engine.kv_use is not None
        ]
        one = _engine(points, levels, key[1]) if len(points) >= levels.forecast_least_steps else None
        found += [one] if one is not None else []
    return min(found, key=lambda one: one.full_in_s, default=None)


def _engine(points: list[tuple[float, float]], levels: Thresholds, engine: str) -> Forecast | None:
    line = trend(points)
    if line is None or line.low <= 0 or line.level >= levels.pool_full_ratio or points[-1][1] >= levels.pool_full_ratio:
        return None
    left = levels.pool_full_ratio - line.level
    full_in_s = left / line.slope
    if full_in_s > levels.forecast_farthest_s:
        return None
    latest_s = left / line.low
    return Forecast(
        full_in_s,
        left / line.high,
        latest_s if latest_s <= levels.forecast_farthest_s else None,
        line.slope * 60,
        engine,
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(round(seconds / 5) * 5, 5)} s"
    return f"{seconds / 60:.0f} min"
