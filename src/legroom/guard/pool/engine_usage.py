"""The engine's step counter, which shows the progress of running requests. A sequence generates one token a step. Steps
between two scrapes are taken to be evenly spaced."""

import os
import re
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from functools import cache

from legroom.facts import metrics

LONGEST_GAP_S = 3.0
"""Scrapes further apart than this are not compared: the engine may have been idle between them."""
RATE_WINDOW_S = 0.4
"""The step rate is averaged over this: two to four scrapes."""


@cache
def _step_counter_names() -> frozenset[str]:
    """The series names, in every release's spelling, of the counter of engine steps."""
    return frozenset(f"{name}_count" for name in metrics.names_of("iteration_tokens"))


def steps_of_page(page: str) -> float | None:
    """Engine steps so far by a metrics page, the mean over engines; None if vLLM does not count them."""
    names = "|".join(map(re.escape, _step_counter_names()))
    samples = re.findall(rf"^({names})(?:\{{.*\}})? ([-+.\deE]+)$", page, re.MULTILINE)
    return _steps_per_engine((name, float(value)) for name, value in samples)


def steps_of_registry() -> float | None:
    """The engine's steps so far by this process's Prometheus registry; None without one or with one of several."""
    prometheus = sys.modules.get("prometheus_client")
    if prometheus is None or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return None
    try:
        families = prometheus.REGISTRY.restricted_registry(list(_step_counter_names())).collect()
        return _steps_per_engine((sample.name, sample.value) for family in families for sample in family.samples)
    except Exception:  # an incompatible prometheus_client
        return None


def _steps_per_engine(samples: Iterable[tuple[str, float]]) -> float | None:
    """The mean of the engines' step counters; None where the metrics have no such counter."""
    engines = [value for name, value in samples if name in _step_counter_names()]
    return sum(engines) / len(engines) if engines else None


class StepClock:
    """Interpolates the engine's step counter over time."""

    __slots__ = ("_scrapes", "rate")

    def __init__(self) -> None:
        self._scrapes: deque[tuple[float, float]] = deque(maxlen=256)
        self.rate = 0.0
        """Steps a second lately; 0 where unknown."""

    def add(self, steps: float, now_s: float) -> None:
        """Add a scrape of the step counter and update the rate; a reset or a long gap starts anew."""
        scrapes = self._scrapes
        if scrapes and not (steps >= scrapes[-1][1] and 0 < now_s - scrapes[-1][0] <= LONGEST_GAP_S):
            scrapes.clear()
            self.rate = 0.0
        scrapes.append((now_s, steps))
        for at_s, before in reversed(scrapes):
            if now_s - at_s >= RATE_WINDOW_S or (at_s, before) == scrapes[0]:
                self.rate = (steps - before) / (now_s - at_s) if now_s > at_s else 0.0
                break

    def steps_since(self, since_s: float, now_s: float) -> float | None:
        """Engine steps between two times, by scrapes and after the last one by the rate; 0 where `since_s` is after the
        last scrape, None before any."""
        if not self._scrapes:
            return None
        last_s, steps = self._scrapes[-1]
        if since_s >= last_s:
            return 0.0
        return steps - self._interpolated_steps(since_s) + self.rate * min(LONGEST_GAP_S, max(0.0, now_s - last_s))

    def _interpolated_steps(self, moment_s: float) -> float:
        """The step counter at a time between two scrapes; before the first scrape, that scrape's value."""
        scrapes = self._scrapes
        after = bisect_right(scrapes, (moment_s, float("inf")))
        if not after:
            return scrapes[0][1]
        (at_s, steps), (then_s, more) = scrapes[after - 1], scrapes[after]
        return steps + (more - steps) * (moment_s - at_s) / (then_s - at_s)
