"""How long a step takes: a roofline, fitted to runs on one card.

A step reads the weights (of the experts those that its tokens choose) and the KV of every token held, and computes each
scheduled token; the slower of the two decides, and the host adds its share. In steps the simulation is exact; in
seconds it is as good as the fit of `step_fit.json`, whose runs and residuals `bench/simulate_fit.py` wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from legroom.errors import LegroomError
from legroom.simulation.fast.columns import StepCost


@dataclass(frozen=True)
class Efficiency:
    """What of a card's figures its kernels reach, and what the host adds to a step."""

    bandwidth_ratio: float
    flops_ratio: float
    host_s: float


@dataclass(frozen=True)
class Hardware:
    """One rank: what it must read and compute, and how fast it can."""

    weights_bytes: float
    """Read in every step."""
    kv_bytes_per_token: float
    flops_per_token: float
    bandwidth_bytes_s: float
    flops_s: float
    expert_bytes: float = 0.0
    """All routed experts."""
    expert_share: float = 1.0
    """Of the routed experts, those that one token chooses."""
    flops_per_pair: float = 0.0
    """Attention of one token to one other, over all layers that attend to everything."""


@cache
def fitted() -> Efficiency:
    """As fitted to measured runs."""
    text = resources.files("legroom.simulation").joinpath("step_fit.json").read_text(encoding="utf-8")
    return Efficiency(**json.loads(text)["fitted"])


def roofline(hardware: Hardware, reached: Efficiency | None = None) -> StepCost:
    reached = reached or fitted()
    if hardware.bandwidth_bytes_s <= 0:
        raise LegroomError(
            "the bandwidth of this GPU is not known, so seconds cannot be estimated", "give --step-ms instead"
        )
    bandwidth = hardware.bandwidth_bytes_s * reached.bandwidth_ratio
    flops = hardware.flops_s * reached.flops_ratio
    return StepCost(
        overhead=reached.host_s,
        token=hardware.flops_per_token / flops if flops > 0 else 0.0,
        weights=hardware.weights_bytes / bandwidth,
        kv_token=hardware.kv_bytes_per_token / bandwidth,
        experts=hardware.expert_bytes / bandwidth,
        idle=1.0 - hardware.expert_share,
        pair=hardware.flops_per_pair / flops if flops > 0 else 0.0,
    )


def fixed(step_s: float) -> StepCost:
    """Every step takes as long."""
    if not step_s > 0:
        raise LegroomError(f"a step cannot take {step_s * 1000:g} ms", "give --step-ms above 0")
    return StepCost(step_s, 0.0, 0.0, 0.0)


def calibrated(cost: StepCost, measured_step_s: float, running: float, tokens_held: float) -> StepCost:
    """Scale the model to what a server showed: its mean time between tokens with so many running and tokens held.

    vLLM's metrics: `vllm:inter_token_latency_seconds` (before 0.11 `vllm:time_per_output_token_seconds`),
    `vllm:num_requests_running`, and the KV usage times the pool's tokens.
    """
    read = cost.weights + cost.experts * (1.0 - cost.idle**running) + cost.kv_token * tokens_held
    predicted = cost.overhead + max(cost.token * running, read)
    if measured_step_s <= 0 or predicted <= 0:
        raise LegroomError("cannot calibrate on a step that takes no time", "measure while the server is busy")
    factor = measured_step_s / predicted
    return StepCost(*(part * factor for part in cost))._replace(idle=cost.idle)
