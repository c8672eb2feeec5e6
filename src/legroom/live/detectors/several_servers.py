"""Several servers answer behind one address, so that totals jump between theirs."""

from __future__ import annotations

from legroom.live.detectors.base import Condition, Detector
from legroom.live.metrics.window import Window
from legroom.live.thresholds import Hold


class SeveralServers(Detector):
    """Scrapes in turn show processes that started at different times and all go on."""

    kind = "several_servers"
    title = "Several servers answer behind one address"
    what_helps = "watch each server by its own address, or all of them through --prometheus or --kubernetes"

    @property
    def hold(self) -> Hold:
        """None: the count of switches is patience enough."""
        return Hold(1, 0.0)

    @property
    def warm_up_s(self) -> float:
        """Switches that lie before the watching are not known."""
        return self.levels.switch_over_s

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Switches in the last minutes."""
        switches = [time_s for time_s in window.switches if time_s > now_s - self.levels.switch_over_s]
        if len(switches) < self.levels.switch_least:
            return Condition(False, not switches)
        reason = (
            f"{len(switches)} times in {(now_s - switches[0]) / 60:.0f} min another process answered than before, "
            "so no rates can be told: a load balancer stands in front"
        )
        return Condition(True, False, reason, {"switches": float(len(switches))})
