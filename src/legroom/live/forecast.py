"""When the KV pool will be full at the present trend."""

import math
import statistics
from collections.abc import Sequence

from legroom.live.metrics.window import SHORTEST_STEP_S, Window
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.records import dataclass

_MAX_POINTS = 120  # 7,140 pairs, which take milliseconds.


@dataclass(frozen=True, slots=True)
class Trend:
    """A Theil-Sen line."""

    slope: float
    """Units per second."""
    low: float
    high: float
    """The 95 % confidence interval of the slope."""
    level: float
    """The value of the line at the last point."""
    rising: float
    """Share of point pairs that rise: 0.5 for noise, 1 for a line."""


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The Theil-Sen trend of (time in seconds, value) points; None for fewer than three."""
    kept = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if len(kept) > _MAX_POINTS:
        step = (len(kept) - 1) / (_MAX_POINTS - 1)
        kept = [kept[round(number * step)] for number in range(_MAX_POINTS)]
    pairs = ((earlier, later) for number, earlier in enumerate(kept) for later in kept[number + 1 :])
    steps = ((later[1] - earlier[1], later[0] - earlier[0]) for earlier, later in pairs)
    slopes = sorted(rise / step_s for rise, step_s in steps if step_s >= SHORTEST_STEP_S)
    if len(kept) < 3 or not slopes:
        return None
    slope = statistics.median(slopes)
    # Sen's confidence interval of the median slope, two-sided 95 %, by the variance of Kendall's statistic.
    spread = 1.96 * math.sqrt(len(kept) * (len(kept) - 1) * (2 * len(kept) + 5) / 18)
    low = slopes[max(int((len(slopes) - spread) / 2), 0)]
    high = slopes[min(int((len(slopes) + spread) / 2) + 1, len(slopes) - 1)]
    level = statistics.median(value + slope * (kept[-1][0] - time) for time, value in kept)
    return Trend(slope, low, high, level, sum(slope_of_pair > 0 for slope_of_pair in slopes) / len(slopes))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted time of a full pool."""

    full_in_s: float
    earliest_s: float
    latest_s: float | None
    """None: later than `forecast_farthest_s`."""
    per_minute: float
    """Growth of KV use per minute, 0..1."""
    engine: str = ""

    @property
    def text(self) -> str:
        """The forecast in words: `pool full in ~4 min at this trend`."""
        seconds = f"{max(round(self.full_in_s / 5) * 5, 5)} s"
        when = seconds if self.full_in_s < 90 else f"{self.full_in_s / 60:.0f} min"
        return f"pool full in ~{when} at this trend"


def pool_forecast(window: Window, levels: Thresholds = DEFAULT) -> Forecast | None:
    """The forecast of the engine whose KV pool fills first; None without a clear rise, or for a full pool."""
    if not window.is_answering:
        return None
    enough_s = (levels.forecast_least_steps + 1) * (window.interval_s or 0.0)
    steps = window.recent(max(levels.forecast_over_s, enough_s))
    if len(steps) < levels.forecast_least_steps:
        return None
    forecasts = []
    for key in {engine.key for engine in steps[-1].engines}:
        uses = ((step.time_s, engine.kv_use) for step in steps for engine in step.engines if engine.key == key)
        points = [(time_s, use) for time_s, use in uses if use is not None]
        ahead = _engine_forecast(points, levels, key[1]) if len(points) >= levels.forecast_least_steps else None
        forecasts += [ahead] if ahead is not None else []
    return min(forecasts, key=lambda ahead: ahead.full_in_s, default=None)


def _engine_forecast(points: list[tuple[float, float]], levels: Thresholds, engine: str) -> Forecast | None:
    """When the rising KV use of an engine fills its pool; None without a clear rise, when full, or too far ahead."""
    line = trend(points)
    if line is None or line.low <= 0 or line.level >= levels.pool_full_ratio or points[-1][1] >= levels.pool_full_ratio:
        return None
    left = levels.pool_full_ratio - line.level
    full_in_s = left / line.slope
    if full_in_s > levels.forecast_farthest_s:
        return None
    latest_s = left / line.low if left / line.low <= levels.forecast_farthest_s else None
    return Forecast(full_in_s, left / line.high, latest_s, line.slope * 60, engine)
