"""Clients are turned away because the server has no room for their requests."""

from legroom.live.detectors.base import GOOD, Condition, Detector, counted
from legroom.live.metrics.window import Window


class RefusedLoad(Detector):
    """Requests that the guard or vLLM's queue limits refuse, as a share of all."""

    kind = "refused_load"
    title = "Requests are refused for lack of room"
    cause = "kv_preemption_thrash"
    entry = "LR403"
    situation = "burst"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where too large a share of a minute's requests was refused; None before two scrapes."""
        steps = window.recent(self.levels.refused_over_s)
        if not window.is_answering or not any(step.guard is not None or step.rejections for step in steps):
            return None if not window.is_answering or not steps else GOOD
        guards = [step.guard for step in steps if step.guard is not None]
        timed_out = sum(guard.timed_out for guard in guards)
        refused = timed_out + sum(guard.refused for guard in guards) + sum(step.rejections for step in steps)
        served = max(sum(guard.admitted for guard in guards), sum(step.total("finished") or 0.0 for step in steps))
        share = refused / max(refused + served, 1.0)
        if refused < self.levels.queue_least or share < self.levels.refused_ratio:
            return GOOD
        waited = f", {timed_out:,.0f} of them after the longest wait that the policy allows" if timed_out else ""
        over_s = sum(step.seconds for step in steps)
        reason = f"{counted(refused, 'request')} of {refused + served:,.0f} in {over_s:.0f} s were refused{waited}"
        return Condition(True, reason, {"refused": refused, "timed_out": timed_out, "refused_ratio": share})
