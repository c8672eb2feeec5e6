"""Nobody asks. That is no error, and is said so that an idle server is not taken for a broken one."""

from __future__ import annotations

from legroom.live.detectors.base import Condition, Detector
from legroom.live.metrics.window import Window, WindowStep
from legroom.live.thresholds import Hold


class NoTraffic(Detector):
    kind = "no_traffic"
    title = "No requests come in"
    severity = "info"
    what_helps = "nothing needs help; if requests were expected, look at what sends them"

    _active_s: float | None = None

    @property
    def hold(self) -> Hold:
        """None: the time without requests is measured itself."""
        return Hold(1, 0.0)

    @property
    def calm(self) -> Hold:
        """The first request ends it."""
        return Hold(1, 0.0)

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Since when nothing happened."""
        if not window.is_answering or not window.steps:
            return None
        if self._active_s is None or now_s < self._active_s or _is_busy(window.steps[-1]):
            self._active_s = now_s
        idle_s = now_s - self._active_s
        if idle_s < self.levels.no_traffic_s:
            return Condition(False, True)
        return Condition(True, False, f"no request for {idle_s / 60:.0f} min", {"idle_s": idle_s})


def _is_busy(step: WindowStep) -> bool:
    return any(step.total(field) for field in ("running", "waiting", "finished", "prompt_tokens", "generation_tokens"))
