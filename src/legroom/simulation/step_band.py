"""How far the seconds of a step can be trusted for a plan: by what was measured, and not at all where nothing was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from legroom.planning.plan import Plan
    from legroom.simulation.fast.columns import StepCost

Basis = Literal["measured", "data_sheet"]


@dataclass(frozen=True)
class StepBand:
    """Factors on the estimated seconds of a step."""

    basis: Basis
    low: float
    high: float


def step_band(plan: Plan) -> StepBand:
    """The narrow band for what was measured; the wide one for what is read from data sheets."""
    data = _data("step_band.json")
    measured, settings = data["measured"], plan.settings
    quantization = settings.quantization or (plan.target.model.quantization and plan.target.model.quantization.method)
    is_measured = (
        plan.target.gpu.name in measured["gpus"]
        and settings.tensor_parallel_size in measured["tensor_parallel_sizes"]
        and quantization in measured["quantizations"]
        and settings.engine in measured["engines"]
    )
    basis: Basis = "measured" if is_measured else "data_sheet"
    return StepBand(basis, data[basis]["low"], data[basis]["high"])


def why_untrusted(plan: Plan, cost: StepCost) -> str:
    """Why seconds of this plan would be a guess; empty where they are an estimate with a band."""
    if plan.target.gpu.bf16_flops <= 0:
        return "how fast it computes is not known, so no time is estimated"
    if cost.experts and not _are_experts_fitted():
        return "steps of models with experts took two to five times the estimate when measured, so no time is given"
    return ""


def _are_experts_fitted() -> bool:
    """The runs that were left out of the fit are those of models with experts."""
    return all(run["is_fitted"] for run in _data("step_fit.json").get("runs", ()))


@cache
def _data(name: str) -> Any:
    return json.loads(resources.files("legroom.simulation").joinpath(name).read_text(encoding="utf-8"))
