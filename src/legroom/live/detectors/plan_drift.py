"""The server is not what was planned: its pool has another size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.live.detectors.base import Condition, Detector, named
from legroom.live.metrics.sample import EngineSample
from legroom.live.metrics.window import Window
from legroom.live.thresholds import Hold


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
        if planned is None or not window.is_answering or window.latest is None:
            return None
        seen = [engine for engine in window.latest.engines if _block_tokens(engine)]
        if not seen:
            return None
        worst = max(seen, key=lambda engine: abs(_block_tokens(engine) / planned - 1))
        return self._condition(worst, planned, window)

    def _condition(self, engine: EngineSample, planned: float, window: Window) -> Condition:
        tokens = _block_tokens(engine)
        off = tokens / planned - 1
        low, high = _band(self.plan or {})
        allowed = self.levels.drift_pool_ratio
        if min(low, -allowed) <= off <= max(high, allowed):
            return Condition(False, True)
        which = named(engine.key, window)
        concurrency = _number((self.plan or {}).get("kv", {}).get("max_concurrency"))
        more = ""
        if engine.max_concurrency and concurrency:
            more = f"; {engine.max_concurrency:.1f} full-length requests at once instead of {concurrency:.1f}"
        reason = (
            f"the KV pool{f' of {which}' if which else ''} holds {tokens:,} tokens, the plan said {planned:,.0f} "
            f"({off:+.0%}){more}"
        )
        numbers = {"pool_tokens": float(tokens), "planned_tokens": planned, "off": off}
        return Condition(True, False, reason, numbers, which, severity="warning" if off < 0 else "info")


def _block_tokens(engine: EngineSample) -> int:
    """Like the plan's: blocks times block size, whatever groups of layers share them."""
    return (engine.num_blocks or 0) * (engine.block_size or 0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _planned_tokens(plan: Mapping[str, Any] | None) -> float | None:
    """Blocks times block size, as vLLM reports them, null block included."""
    kv = (plan or {}).get("kv", {})
    blocks, size = _number(kv.get("num_blocks")), _number(kv.get("block_size"))
    return blocks * size if blocks and size else None


def _band(plan: Mapping[str, Any]) -> tuple[float, float]:
    """How far off the plan itself says that it may be."""
    middle = _number(plan.get("layout", {}).get("kv_cache_bytes"))
    sure = plan.get("confidence", {}).get("kv_cache_bytes", {})
    low, high = _number(sure.get("low")), _number(sure.get("high"))
    return (low / middle - 1, high / middle - 1) if middle and low and high else (0.0, 0.0)
