"""How long a step takes, where a trace tells arrivals in seconds: a roofline, always an estimate.

A step reads every weight once and the KV of every token held, and computes each scheduled token; the slower of the two
decides, and the host adds its share. In steps the simulation is exact; in seconds it is as good as these four numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.errors import LegroomError
from legroom.simulation.fast.columns import StepCost

BANDWIDTH_REACHED = 0.8
"""Share of a card's memory bandwidth that decode kernels reach (published decode benchmarks: 0.7 to 0.9)."""
FLOPS_REACHED = 0.5
"""Share of the dense matrix rate that prefill reaches (0.4 to 0.6)."""
HOST_S = 0.003
"""Scheduling, launching and sampling of one step beside the GPU's work (2 to 5 ms)."""


@dataclass(frozen=True)
class Hardware:
    """One rank: what it must read and compute, and how fast it can."""

    weights_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    bandwidth_bytes_s: float
    flops_s: float


def roofline(hardware: Hardware) -> StepCost:
    """The cost of steps on this hardware."""
    if hardware.bandwidth_bytes_s <= 0:
        raise LegroomError(
            "the bandwidth of this GPU is not known, so seconds cannot be estimated", "give --step-ms instead"
        )
    bandwidth = hardware.bandwidth_bytes_s * BANDWIDTH_REACHED
    flops = hardware.flops_s * FLOPS_REACHED
    return StepCost(
        overhead=HOST_S,
        token=hardware.flops_per_token / flops if flops > 0 else 0.0,
        weights=hardware.weights_bytes / bandwidth,
        kv_token=hardware.kv_bytes_per_token / bandwidth,
    )


def fixed(step_s: float) -> StepCost:
    """Every step takes as long."""
    if not step_s > 0:
        raise LegroomError(f"a step of {step_s * 1000:g} ms takes no time", "give --step-ms above 0")
    return StepCost(step_s, 0.0, 0.0, 0.0)


def calibrated(cost: StepCost, measured_step_s: float, running: float, tokens_held: float) -> StepCost:
    """Scale the model to what a server showed: its mean time between tokens with so many running and tokens held.

    vLLM's metrics: `vllm:inter_token_latency_seconds` (before 0.11 `vllm:time_per_output_token_seconds`),
    `vllm:num_requests_running`, and the KV usage times the pool's tokens.
    """
    predicted = cost.overhead + max(cost.token * running, cost.weights + cost.kv_token * tokens_held)
    if measured_step_s <= 0 or predicted <= 0:
        raise LegroomError("cannot calibrate on a step of no length", "measure while the server is busy")
    factor = measured_step_s / predicted
    return StepCost(*(part * factor for part in cost))
