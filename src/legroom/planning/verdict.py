"""From a deployment's memory to an answer, and how much of the error band each policy keeps as headroom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from legroom.memory.kv_plan import kv_plan
from legroom.units import human_bytes

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.memory.deployment import DeploymentMemory
    from legroom.memory.layout import Layout
    from legroom.vllm.args import EngineSettings

Verdict = Literal["fits", "tight", "does_not_fit"]
Policy = Literal["safe", "balanced", "tight"]

BAND_KEPT: dict[Policy, float] = {"safe": 1.0, "balanced": 0.5, "tight": 0.0}
"""Share of the error band that a policy holds back: all of it, half of it, none."""


def verdict(model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory) -> tuple[Verdict, str]:
    """Whether the server starts and holds, with the reason in words.

    `does_not_fit`: a check fails with the expected figures. `tight`: it starts, but a figure at the bad end of its
    band fails a check, or the card runs over while serving. `fits`: it holds across the band.
    """
    if memory.failure:
        return "does_not_fit", memory.failure.id
    over = [rank for rank in memory.ranks if headroom_left(rank, 0.0) < 0]
    if over:
        return "tight", f"the card runs {human_bytes(-headroom_left(over[0], 0.0))} over at its peak"
    pessimistic = [rank.kv_cache.low for rank in memory.ranks]
    if kv_plan(model, settings, gpu, pessimistic).failure:
        return "tight", "at the low end of the error band the KV cache is too small"
    if any(headroom_left(rank, 1.0) < 0 for rank in memory.ranks):
        return "tight", "at the high end of the error band the card runs over at its peak"
    return "fits", ""


def headroom_left(layout: Layout, band_kept: float) -> int:
    """Bytes left of the card at its peak after holding back a share of what could be worse.

    The KV pool shrinks by what the counted parts grow, so only what is outside the budget adds to the peak.
    """
    worse = layout.outside.high - layout.outside.bytes
    return layout.headroom_bytes - int(worse * band_kept)
