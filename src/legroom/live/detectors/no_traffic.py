"""No requests arrive. Reported as info, so that an idle server is not mistaken for a broken one."""

from legroom.live.detectors.base import AT_ONCE, GOOD, Condition, Detector
from legroom.live.metrics.sample import GuardSample
from legroom.live.metrics.window import Window

_ACTIVITY = ("running", "waiting", "finished", "prompt_tokens", "generation_tokens")


class NoTraffic(Detector):
    kind = "no_traffic"
    title = "No requests come in"
    severity = "info"
    begins_after = ends_after = AT_ONCE

    _active_s: float | None = None

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where no request ran, waited or finished for `no_traffic_s`; None before two scrapes."""
        if not window.is_answering or not window.steps:
            return None
        last = window.steps[-1]
        is_active = any(map(last.total, _ACTIVITY)) or last.guard not in (None, GuardSample()) or last.rejections
        if self._active_s is None or now_s < self._active_s or is_active:
            self._active_s = now_s
        idle_s = now_s - self._active_s
        if idle_s < self.levels.no_traffic_s:
            return GOOD
        return Condition(True, f"no request for {idle_s / 60:.0f} min", {"idle_s": idle_s})
