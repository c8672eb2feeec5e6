"""The KV pool has another size than planned. Also compares a whole plan with a running server."""

from typing import Literal

from legroom.live.detectors.base import GOOD, Condition, Detector, engine_label
from legroom.live.metrics.sample import EngineSample, Sample
from legroom.live.metrics.window import Window
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass

ComparedName = Literal["num_blocks", "pool_tokens", "max_concurrency", "memory_used_bytes"]


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A planned figure and the running server's."""

    name: ComparedName
    planned: float
    low: float
    high: float
    """The accepted range: the plan's own band, at least as wide as the tolerance of `plan_drift`."""
    actual: float | None
    """None: not reported by the server."""

    @property
    def is_as_planned(self) -> bool | None:
        """Whether the actual value lies within the planned range; None where there is no actual value."""
        return None if self.actual is None else self.low <= self.actual <= self.high


def compare_with_plan(plan: PlanDocument, sample: Sample, levels: Thresholds = DEFAULT) -> tuple[ComparedFigure, ...]:
    """Planned against actual figures of the engine whose KV pool deviates most; () where the plan has no KV pool."""
    tokens = _planned_tokens(plan)
    if tokens is None:
        return ()
    low, high = _tolerated_deviation(plan, levels)
    engine = _most_deviating_engine(sample, tokens)
    figures: list[tuple[ComparedName, float, float | None]] = [
        ("num_blocks", plan.kv.num_blocks, engine.num_blocks if engine else None),
        ("pool_tokens", tokens, _pool_tokens(engine) if engine else None),
        ("max_concurrency", plan.kv.max_concurrency, engine.max_concurrency if engine else None),
    ]
    rows = [
        ComparedFigure(name, planned, planned * (1 + low), planned * (1 + high), actual)
        for name, planned, actual in figures
    ]
    band, gpus = plan.confidence.get("peak_used_bytes"), max(plan.gpu.count, 1)
    peak_bytes = plan.layout.peak_used_bytes
    most_bytes = max(band.high or 0 if band else 0, peak_bytes) * gpus
    # Less than the planned peak is normal at any one time.
    rows.append(ComparedFigure("memory_used_bytes", peak_bytes * gpus, 0, most_bytes, sample.memory_used_bytes))
    return tuple(row for row in rows if row.planned > 0)


class PlanDrift(Detector):
    """Compares the pool of `vllm:cache_config_info` with the plan."""

    kind = "plan_drift"
    title = "The pool is not the planned one"
    cause = "gpu_shared_or_not_free"
    entry = "LR205"
    begins_after = "drift_hold"

    def measure(self, window: Window, now_s: float) -> Condition | None:
        """Bad where the engine that deviates most is outside the tolerance; None without a plan or a reported pool."""
        planned = _planned_tokens(self.plan) if self.plan else None
        if self.plan is None or planned is None or not window.is_answering or window.latest is None:
            return None
        engine = _most_deviating_engine(window.latest, planned)
        if engine is None:
            return None
        tokens = _pool_tokens(engine) or 0
        deviation = tokens / planned - 1
        low, high = _tolerated_deviation(self.plan, self.levels)
        if low <= deviation <= high:
            return GOOD
        which, more, planned_requests = engine_label(engine.key, window), "", self.plan.kv.max_concurrency
        if engine.max_concurrency and planned_requests > 0:
            more = f"; {engine.max_concurrency:.1f} full-length requests at once instead of {planned_requests:.1f}"
        reason = f"the KV pool{f' of {which}' if which else ''} holds {tokens:,} tokens, the plan said {planned:,.0f} "
        reason += f"({deviation:+.0%}){more}"
        numbers = {"pool_tokens": float(tokens), "planned_tokens": planned, "off": deviation}
        return Condition(True, reason, numbers, which, severity="warning" if deviation < 0 else "info")


def _most_deviating_engine(sample: Sample, planned: float) -> EngineSample | None:
    """The engine whose KV pool differs most from the planned tokens; None where no engine shows its pool."""
    shown = [engine for engine in sample.engines if _pool_tokens(engine)]
    return max(shown, key=lambda engine: abs((_pool_tokens(engine) or 0) / planned - 1), default=None)


def _pool_tokens(engine: EngineSample) -> int | None:
    """An engine's KV blocks times block size, as in the plan; None where not reported."""
    return (engine.num_blocks or 0) * (engine.block_size or 0) or None


def _planned_tokens(plan: PlanDocument) -> float | None:
    """The KV pool the plan expects, in tokens; None where it is zero."""
    return float(max(plan.kv.num_blocks, 0) * max(plan.kv.block_size, 0)) or None


def _tolerated_deviation(plan: PlanDocument, levels: Thresholds) -> tuple[float, float]:
    """(lowest, highest) accepted deviation of a pool from the planned one, as shares of it: such as (-0.05, 0.05)."""
    middle, band = plan.layout.kv_cache_bytes, plan.confidence.get("kv_cache_bytes")
    low, high = (band.low or 0, band.high or 0) if band else (0, 0)
    own = (low / middle - 1, high / middle - 1) if min(middle, low, high) > 0 else (0.0, 0.0)
    return min(own[0], -levels.drift_pool_ratio), max(own[1], levels.drift_pool_ratio)
