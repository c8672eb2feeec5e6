"""A load balancer answers for several servers, so that counters jump between theirs."""

from legroom.live.detectors.base import AT_ONCE, GOOD, Condition, Detector
from legroom.live.metrics.window import Window


class SeveralServers(Detector):
    """Counts switches between process start times that are all in the past."""

    kind = "several_servers"
    title = "Several servers answer behind one address"
    begins_after = AT_ONCE
    ends_after = "switch_over_s"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where the process start time switched between old values `switch_least` times, else good."""
        switches = [time_s for time_s in window.switches if time_s > now_s - self.levels.switch_over_s]
        if len(switches) < self.levels.switch_least:
            return GOOD
        reason = f"{len(switches)} times in {(now_s - switches[0]) / 60:.0f} min another process answered than before, "
        reason += "so no rates can be told: a load balancer stands in front"
        return Condition(True, reason, {"switches": float(len(switches))})
