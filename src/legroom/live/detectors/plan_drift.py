"""The server is not what was planned: its pool has another size."""

from __future__ import annotations

from legroom.live.detectors.base import Condition, Detector, engine_label
from legroom.live.metrics.sample import EngineSample
from legroom.live.metrics.window import Window
from legroom.live.plan_comparison import block_tokens, furthest_engine, planned_tokens, tolerated_deviation
from legroom.live.thresholds import Hold
from legroom.planning.plan_document import PlanDocument


class PlanDrift(Detector):
    """Blocks and concurrency of `vllm:cache_config_info` against the plan."""

    kind = "plan_drift"
    title = "The pool is not the planned one"
    cause = "gpu_shared_or_not_free"
    entry = "LR205"
    what_helps = "compare flags, release and GPU with the plan; legroom calibrate LOG learns what this machine does"

    @property
    def hold(self) -> Hold:
        """Its own: a pool keeps its size."""
        return self.levels.drift_hold

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """The engine that is furthest off; None without a plan or a pool."""
        planned = planned_tokens(self.plan) if self.plan else None
        if self.plan is None or planned is None or not window.is_answering or window.latest is None:
            return None
        worst = furthest_engine(window.latest, planned)
        return self._condition(worst, self.plan, planned, window) if worst else None

    def _condition(self, engine: EngineSample, plan: PlanDocument, planned: float, window: Window) -> Condition:
        tokens = block_tokens(engine) or 0
        off = tokens / planned - 1
        low, high = tolerated_deviation(plan, self.levels)
        if low <= off <= high:
            return Condition(False, True)
        which = engine_label(engine.key, window)
        more = ""
        if engine.max_concurrency and plan.kv.max_concurrency > 0:
            more = (
                f"; {engine.max_concurrency:.1f} full-length requests at once instead of {plan.kv.max_concurrency:.1f}"
            )
        reason = (
            f"the KV pool{f' of {which}' if which else ''} holds {tokens:,} tokens, the plan said {planned:,.0f} "
            f"({off:+.0%}){more}"
        )
        numbers = {"pool_tokens": float(tokens), "planned_tokens": planned, "off": off}
        return Condition(True, False, reason, numbers, which, severity="warning" if off < 0 else "info")
