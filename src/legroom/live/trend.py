"""A slope that outliers cannot bend: the median over all pairs (Theil-Sen), with how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from legroom.records import dataclass

_MOST_POINTS = 120
"""Pairs grow with the square: seven thousand take milliseconds."""
_Z = 1.96
"""Two-sided 95 %."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through points."""

    slope: float
    """Units a second."""
    low: float
    high: float
    """Where the slope lies with 95 % confidence."""
    level: float
    """The line's value at the last point."""
    rising: float
    """Share of pairs that rise; a half for noise, one for a line."""

    @property
    def is_clear(self) -> bool:
        """Whether the whole band points the same way."""
        return self.low > 0 or self.high < 0


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of (time, value) points; None for fewer than three, or all at one time."""
    kept = _thinned([point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])])
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(kept)
        for later in kept[number + 1 :]
        if later[0] > earlier[0]
    )
    if len(kept) < 3 or not slopes:
        return None
    slope = statistics.median(slopes)
    low, high = _band(slopes, len(kept))
    end = kept[-1][0]
    level = statistics.median(value + slope * (end - time) for time, value in kept)
    return Trend(slope, low, high, level, sum(one > 0 for one in slopes) / len(slopes))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST_POINTS:
        return points
    step = (len(points) - 1) / (_MOST_POINTS - 1)
    return [points[round(number * step)] for number in range(_MOST_POINTS)]


def _band(slopes: list[float], points: int) -> tuple[float, float]:
    """Sen's band: the ranks around the median that Kendall's statistic gives by chance."""
    spread = _Z * math.sqrt(points * (points - 1) * (2 * points + 5) / 18)
    low = max(int((len(slopes) - spread) / 2), 0)
    high = min(int((len(slopes) + spread) / 2) + 1, len(slopes) - 1)
    return slopes[low], slopes[high]
