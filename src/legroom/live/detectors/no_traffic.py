"""No requests arrive. Reported as info, so that an idle server is not mistaken for a broken one."""

from __future__ import annotations

from legroom.live.detectors.base import GOOD, Condition, Detector
from legroom.live.metrics.window import Window, WindowStep
from legroom.live.thresholds import Hold


class NoTraffic(Detector):
    kind = "no_traffic"
    title = "No requests come in"
    severity = "info"

    _active_s: float | None = None

    @property
    def hold(self) -> Hold:
        """The idle time is the duration."""
        return Hold(1, 0.0)

    @property
    def calm(self) -> Hold:
        """Ends with the first request."""
        return Hold(1, 0.0)

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Measures the time since the last activity."""
        if not window.is_answering or not window.steps:
            return None
        if self._active_s is None or now_s < self._active_s or _is_busy(window.steps[-1]):
            self._active_s = now_s
        idle_s = now_s - self._active_s
        if idle_s < self.levels.no_traffic_s:
            return GOOD
        return Condition(True, f"no request for {idle_s / 60:.0f} min", {"idle_s": idle_s})


def _is_busy(step: WindowStep) -> bool:
    return any(step.total(field) for field in ("running", "waiting", "finished", "prompt_tokens", "generation_tokens"))
