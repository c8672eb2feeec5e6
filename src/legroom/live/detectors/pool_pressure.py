"""The KV pool is full, and requests wait or are preempted. A full pool alone is healthy."""

from legroom.live.detectors.base import Condition, Detector, counted, engine_label, worst_condition
from legroom.live.metrics.window import EngineStep, Window


class PoolPressure(Detector):
    kind = "pool_pressure"
    title = "The KV pool is full and requests wait for it"
    cause = "kv_preemption_thrash"
    entry = "LR403"
    situation = "burst"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where a KV pool was full in the last step and requests queued or were preempted; None without a step."""
        if not window.is_answering or not window.steps:
            return None
        known = (engine for engine in window.steps[-1].engines if engine.kv_use is not None)
        return worst_condition([self._engine_condition(engine, window) for engine in known])

    def _engine_condition(self, engine: EngineStep, window: Window) -> Condition:
        """Bad where this engine's KV pool has no room and requests queued or were preempted in the step, else good."""
        use = engine.peak_kv_use
        preempted = engine.preemptions or 0.0
        suffers = engine.queued > 0 or preempted > 0
        has_no_room = engine.has_no_room(self.levels.pool_full_ratio)
        if not has_no_room or not suffers:
            return Condition(False, is_calm=use < self.levels.pool_calm_ratio or not suffers)
        which = engine_label(engine.key, window)
        of = f" of {which}" if which else ""
        blocks = f" ({use * engine.num_blocks:,.0f} of {engine.num_blocks:,} blocks)" if engine.num_blocks else ""
        pains = [f"{counted(engine.queued, 'request')} wait"] if engine.queued else []
        if preempted:
            pains.append(f"{counted(preempted, 'request')} were preempted in {engine.seconds:.0f} s")
        room = "" if use >= self.levels.pool_full_ratio else " and no room for one more like them"
        reason = f"the KV pool{of} is {use:.0%} full{blocks} with {engine.running or 0:,.0f} running{room}, and "
        reason += f"{' and '.join(pains)}"
        numbers = {"kv_use": use, "running": engine.running or 0.0, "waiting": engine.queued, "preempted": preempted}
        return Condition(True, reason, numbers, which)
