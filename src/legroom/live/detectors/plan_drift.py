"""The server is not what was planned: its pool has another size."""

from __future__ import annotations

from legroom.live.detectors.base import Condition, Detector, named
from legroom.live.metrics.sample import EngineSample
from legroom.live.metrics.window import Window
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
        planned = _planned_tokens(self.plan)
        if self.plan is None or planned is None or not window.is_answering or window.latest is None:
            return None
        seen = [engine for engine in window.latest.engines if _block_tokens(engine)]
        if not seen:
            return None
        worst = max(seen, key=lambda engine: abs(_block_tokens(engine) / planned - 1))
        return self._condition(worst, self.plan, planned, window)

    def _condition(self, engine: EngineSample, plan: PlanDocument, planned: float, window: Window) -> Condition:
        tokens = _block_tokens(engine)
        off = tokens / planned - 1
        low, high = _band(plan)
        allowed = self.levels.drift_pool_ratio
        if min(low, -allowed) <= off <= max(high, allowed):
            return Condition(False, True)
        which = named(engine.key, window)
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


def _block_tokens(engine: EngineSample) -> int:
    """Like the plan's: blocks times block size, whatever groups of layers share them."""
    return (engine.num_blocks or 0) * (engine.block_size or 0)


def _planned_tokens(plan: PlanDocument | None) -> float | None:
    """Blocks times block size, as vLLM reports them, null block included."""
    return float(max(plan.kv.num_blocks, 0) * max(plan.kv.block_size, 0)) or None if plan else None


def _band(plan: PlanDocument) -> tuple[float, float]:
    """How far off the plan itself says that it may be."""
    middle, band = plan.layout.kv_cache_bytes, plan.confidence.get("kv_cache_bytes")
    low, high = (band.low or 0, band.high or 0) if band else (0, 0)
    return (low / middle - 1, high / middle - 1) if min(middle, low, high) > 0 else (0.0, 0.0)
