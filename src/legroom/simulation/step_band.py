"""How far the seconds of a step can be trusted for a plan: by what was measured, and not at all where nothing was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from legroom.simulation.fast.accounting import least_seconds, step_seconds
from legroom.simulation.steptime import roofline

if TYPE_CHECKING:
    from legroom.planning.plan import Plan
    from legroom.simulation.fast.columns import StepCost
    from legroom.simulation.steptime import Hardware

Basis = Literal["measured", "data_sheet"]
"""What the estimate of a step rests on."""


@dataclass(frozen=True)
class StepBand:
    """Factors on the estimated seconds of a step."""

    basis: Basis
    low: float
    high: float


def step_band(plan: Plan, work: Hardware) -> StepBand:
    """The narrow band for what was measured; the wide one for what is read from data sheets; a wider one where even a
    full step waits for the host, whose time for the same step differs from one to the next."""
    data = _data()
    measured, settings = data["measured"], plan.settings
    is_measured = (
        plan.target.gpu.name in measured["gpus"]
        and settings.tensor_parallel_size in measured["tensor_parallel_sizes"]
        and settings.engine in measured["engines"]
        and _weights(plan, work) in measured["weights"]
    )
    basis: Basis = "measured" if is_measured else "data_sheet"
    low, high = data[basis]["low"], data[basis]["high"]
    if _waits_for_host(roofline(work), settings.max_num_batched_tokens):
        low, high = min(low, data["host"]["low"]), max(high, data["host"]["high"])
    return StepBand(basis, low, high)


def _waits_for_host(cost: StepCost, tokens: int) -> bool:
    """Whether the host needs longer to start a step of one prompt than the GPU to compute it."""
    on_gpu = cost._replace(launch=0.0, launch_captured=0.0)
    return bool(step_seconds(on_gpu, tokens, tokens, 1) < least_seconds(cost, tokens, 1))  # type: ignore[no-untyped-call]


def why_untrusted(plan: Plan, work: Hardware) -> str:
    """Why seconds of this plan would be a guess; empty where they are an estimate with a band."""
    if work.flops_s <= 0:
        return "how fast it computes is not known, so no time is estimated"
    if work.all_reduces and not work.link_bytes_s:
        return str(_data()["split"]["why_untrusted"])
    experts = _data()["experts"]
    if work.expert_bytes and plan.target.model.name not in experts["measured_models"]:
        return str(experts["why_untrusted"])
    return ""


def _weights(plan: Plan, work: Hardware) -> str:
    if work.is_fp8:
        return "fp8"
    return "quantized" if plan.settings.quantization or plan.target.model.quantization else "16-bit"


@cache
def _data() -> Any:
    text = resources.files("legroom.simulation").joinpath("step_band.json").read_text(encoding="utf-8")
    return json.loads(text)
