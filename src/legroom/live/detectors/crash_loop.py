"""The server starts again and again."""

from __future__ import annotations

from legroom.live.detectors.base import Condition, Detector
from legroom.live.metrics.window import Window
from legroom.live.thresholds import Hold


class CrashLoop(Detector):
    kind = "crash_loop"
    title = "The server crashes and starts over"
    severity = "critical"
    cause = "not_memory"
    entry = "LR908"
    situation = "start-up"
    what_helps = "the cause, from its log (legroom diagnose LOG); one more restart repeats it"

    @property
    def hold(self) -> Hold:
        """None: the count of starts is patience enough."""
        return Hold(1, 0.0)

    @property
    def warm_up_s(self) -> float:
        """Starts that lie before the watching are not known."""
        return self.levels.crash_over_s

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Starts that were seen: totals that fell, or a new process start time."""
        over_s = self.levels.crash_over_s
        starts = [time_s for time_s in window.restarts if time_s > now_s - over_s]
        if len(starts) < self.levels.crash_restarts:
            return Condition(False, not starts)
        reason = f"{len(starts)} starts in {(now_s - starts[0]) / 60:.0f} min, the last {now_s - starts[-1]:.0f} s ago"
        return Condition(True, False, reason, {"restarts": float(len(starts)), "over_s": now_s - starts[0]})
