"""The server does not answer, or not with metrics."""

from legroom.live.detectors.base import GOOD, Condition, Detector, Severity, counted
from legroom.live.metrics.window import Window
from legroom.live.thresholds import Hold

_SERVER_IS_AT_FAULT = frozenset({"refused", "timeout", "http_error", "cut_short", "unreachable"})
"""The other failure kinds are wrong settings: a host name, a certificate, a token, an address."""


class Unreachable(Detector):
    kind = "unreachable"
    title = "The server does not answer"
    severity = "critical"
    cause = "not_memory"
    entry = "LR908"
    situation = "start-up"
    restart_helps = True
    begins_after = "unreachable_hold"
    ends_after = Hold(2, 0.0)
    """Two answers in a row."""

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad while scrapes fail; critical if the server answered before and no setting (host, TLS, token) is why."""
        if not window.failures:
            return GOOD
        last = window.failures[-1]
        up_s = window.latest.time_s if window.latest else window.answered_earlier_s
        before = "; it never did" if up_s is None else f"; it answered until {max(now_s - up_s, 0.0):.0f} s ago"
        lost = (window.latest.running or 0.0) if window.latest else 0.0
        running = f", with {counted(lost, 'request')} running" if lost else ""
        at_fault = last.kind in _SERVER_IS_AT_FAULT
        reason = f"{last.message} ({counted(len(window.failures), 'scrape')} in a row{before}{running})"
        numbers = {"failed_looks": float(len(window.failures)), "running_before": lost}
        is_dead = at_fault and up_s is not None
        severity: Severity = "critical" if is_dead else "warning"
        return Condition(True, reason, numbers, severity=severity, restart_helps=is_dead)
