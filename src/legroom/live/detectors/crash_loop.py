"""The server starts several times within minutes without being asked to."""

from legroom.live.detectors.base import AT_ONCE, GOOD, Condition, Detector
from legroom.live.metrics.window import Window


class CrashLoop(Detector):
    kind = "crash_loop"
    title = "The server crashes and starts over"
    severity = "critical"
    cause = "not_memory"
    entry = "LR908"
    situation = "start-up"
    begins_after = AT_ONCE
    ends_after = "crash_over_s"
    """As long as the window of counted restarts, so that slow crash loops do not flap."""

    def measure(self, window: Window, now_s: float) -> Condition:
        """Bad if at least `crash_restarts` starts within `crash_over_s` seconds were not requested, else good."""
        starts = [time_s for time_s in window.crashes if time_s > now_s - self.levels.crash_over_s]
        if len(starts) < self.levels.crash_restarts:
            return GOOD
        reason = f"{len(starts)} starts in {(now_s - starts[0]) / 60:.0f} min, the last {now_s - starts[-1]:.0f} s ago"
        return Condition(True, reason, {"restarts": float(len(starts)), "over_s": now_s - starts[0]})
