"""The queue is longer than the server can serve within seconds."""

from legroom.live.detectors.base import GOOD, Condition, Detector, counted
from legroom.live.metrics.window import Window


class QueueBacklog(Detector):
    """Waiting requests against running ones and against the service rate."""

    kind = "queue_backlog"
    title = "The queue grows faster than it is served"
    cause = "kv_preemption_thrash"
    entry = "LR403"
    situation = "burst"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where many requests wait in engines and guard, compared with the running ones, for more than
        `queue_wait_s` now or by forecast; None where the server does not answer or report a queue, else good."""
        if not window.is_answering or not window.steps:
            return None
        levels = self.levels
        last = window.steps[-1]
        if last.total("waiting") is None:
            return None
        in_guard = last.guard.waiting if last.guard is not None else 0.0
        waiting = in_guard + sum(engine.queued for engine in last.engines)
        running = last.total("running") or 0.0
        rate = window.rate("finished")
        before = last.guard_waiting_before + sum(engine.queued_before for engine in last.engines)
        grows = max(waiting - before, 0.0) / last.seconds
        wait_s = waiting / rate if rate else None
        # A growing queue counts with the length it will have in a few scrapes.
        ahead_s = (waiting + grows * levels.queue_ahead_s) / rate if rate else None
        is_long = ahead_s is None or ahead_s >= levels.queue_wait_s
        if waiting < levels.queue_least or waiting < levels.queue_per_running_ratio * running or not is_long:
            return GOOD
        use = max((engine.peak_kv_use for engine in last.engines if engine.kv_use is not None), default=None)
        served = f"at {rate:.2g} finished a second a new one waits {wait_s:,.0f} s" if wait_s else "none finished"
        more = f", {grows:.2g} more every second" if grows else ""
        holds = ""
        if in_guard:
            holds = f"; the guard holds {in_guard:,.0f} of them until the pool has room"
        elif use is not None:
            limit = "the pool" if use >= levels.pool_calm_ratio else "the batch limit"
            holds = f"; the KV pool is {use:.0%} full, so {limit} holds them back"
        reason = f"{counted(waiting, 'request')} wait behind {running:,.0f} running{more}; {served}{holds}"
        numbers = {"waiting": waiting, "running": running, "finished_per_s": rate or 0.0}
        if wait_s is not None:
            numbers["wait_s"] = wait_s
        if use is not None:
            numbers["kv_use"] = use
        return Condition(True, reason, numbers)
