"""A plan beside what its server shows: how large the pool is, how many requests it holds, what the GPUs hold."""

from __future__ import annotations

from typing import Literal

from legroom.live.metrics.sample import EngineSample, Sample
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass

ComparedName = Literal["num_blocks", "pool_tokens", "max_concurrency", "memory_used_bytes"]


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure as planned and as seen."""

    name: ComparedName
    planned: float
    low: float
    high: float
    """What still counts as planned: the plan's own band, and never less than the tolerance of `plan_drift`."""
    actual: float | None
    """None: the server does not show it."""

    @property
    def is_as_planned(self) -> bool | None:
        return None if self.actual is None else self.low <= self.actual <= self.high


def compare(plan: PlanDocument, sample: Sample, levels: Thresholds = DEFAULT) -> tuple[ComparedFigure, ...]:
    """What can be compared, for the engine whose pool is furthest off; () where the plan has no pool."""
    tokens = planned_tokens(plan)
    if tokens is None:
        return ()
    off = tolerated_deviation(plan, levels)
    engine = furthest_engine(sample, tokens)
    rows = [
        _row("num_blocks", plan.kv.num_blocks, engine.num_blocks if engine else None, off),
        _row("pool_tokens", tokens, block_tokens(engine) if engine else None, off),
        _row("max_concurrency", plan.kv.max_concurrency, engine.max_concurrency if engine else None, off),
    ]
    peak = plan.confidence.get("peak_used_bytes")
    gpus = max(plan.gpu.count, 1)
    rows.append(
        # All GPUs together may hold less than the peak at any time: only more than its band is not as planned.
        ComparedFigure(
            "memory_used_bytes",
            plan.layout.peak_used_bytes * gpus,
            0,
            max(peak.high or 0 if peak else 0, plan.layout.peak_used_bytes) * gpus,
            sample.memory_used_bytes,
        )
    )
    return tuple(row for row in rows if row.planned > 0)


def _row(name: ComparedName, planned: float, actual: float | None, off: tuple[float, float]) -> ComparedFigure:
    return ComparedFigure(name, planned, planned * (1 + off[0]), planned * (1 + off[1]), actual)


def furthest_engine(sample: Sample, planned: float) -> EngineSample | None:
    """The engine whose pool is furthest from the planned one; None where none shows its pool."""
    shown = [engine for engine in sample.engines if block_tokens(engine)]
    return max(shown, key=lambda engine: abs((block_tokens(engine) or 0) / planned - 1), default=None)


def block_tokens(engine: EngineSample) -> int | None:
    """Like the plan's: blocks times block size, whatever groups of layers share them."""
    return (engine.num_blocks or 0) * (engine.block_size or 0) or None


def planned_tokens(plan: PlanDocument) -> float | None:
    """Blocks times block size, as vLLM reports them, null block included."""
    return float(max(plan.kv.num_blocks, 0) * max(plan.kv.block_size, 0)) or None


def tolerated_deviation(plan: PlanDocument, levels: Thresholds) -> tuple[float, float]:
    """How far off, as shares of the planned pool, still counts as planned: what the plan itself says, or a little."""
    middle, band = plan.layout.kv_cache_bytes, plan.confidence.get("kv_cache_bytes")
    low, high = (band.low or 0, band.high or 0) if band else (0, 0)
    own = (low / middle - 1, high / middle - 1) if min(middle, low, high) > 0 else (0.0, 0.0)
    return min(own[0], -levels.drift_pool_ratio), max(own[1], levels.drift_pool_ratio)
