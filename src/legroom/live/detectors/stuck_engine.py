"""The engine hangs while its API server still answers: no metric changes, or its processes are stopped."""

from itertools import takewhile

from legroom.live.detectors.base import GOOD, Condition, Detector, counted, engine_label
from legroom.live.metrics.window import EngineStep, Window


class StuckEngine(Detector):
    """Requests run and no metric of the engine changes; or an engine process is stopped by a signal."""

    kind = "stuck_engine"
    title = "The engine hangs: requests run and no token comes"
    severity = "critical"
    cause = "not_memory"
    entry = "LR908"
    restart_helps = True
    begins_after = "stuck_hold"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where a process is stopped, or an engine runs requests without progress; None if neither is reported."""
        if not window.is_answering:
            return None
        if window.latest is not None and window.latest.stopped_engines:
            stopped = window.latest.stopped_engines
            which = "a process of it is" if stopped == 1 else f"{stopped} processes of it are"
            reason = f"{which} stopped (SIGSTOP): every request waits until it is let go on (kill -CONT) or restarted"
            title, numbers = "The engine is stopped", {"stopped": float(stopped)}
            return Condition(True, reason, numbers, title=title, is_certain=True)
        if not window.steps:
            return None
        last = window.steps[-1]
        if last.total("running") is None or last.total("generation_tokens") is None:
            return None
        running = (engine for engine in last.engines if (engine.running or 0.0) > 0 and not engine.asleep)
        stuck = [self._engine_condition(engine, window) for engine in running if not engine.has_progress]
        return min(stuck, key=lambda condition: condition.severity == "warning", default=GOOD)

    def _engine_condition(self, engine: EngineStep, window: Window) -> Condition:
        """The bad condition of an engine that makes no progress; a warning where it may still be compiling kernels."""
        which, running = engine_label(engine.key, window), engine.running or 0.0
        idle_steps = takewhile(
            lambda step: any(each.key == engine.key and not each.has_progress for each in step.engines),
            reversed(window.steps),
        )
        still_s = sum(step.seconds for step in idle_steps)
        totals = [each for each in (window.latest.engines if window.latest else ()) if each.key == engine.key]
        has_computed = any(total.prompt_tokens or total.generation_tokens for total in totals)
        reason = (
            f"{counted(running, 'request')} run{f' on {which}' if which else ''}, and for {still_s:.0f} s no token "
            "came and no other figure moved"
        )
        numbers = {"running": running, "still_s": still_s}
        if still_s >= self.levels.stuck_first_s or has_computed:
            return Condition(True, reason, numbers, which)
        reason += "; it has computed nothing since its start, so it may be compiling kernels"
        return Condition(True, reason, numbers, which, severity="warning", restart_helps=False)
