"""The seconds of a step: a roofline and the host's share, fitted to measured steps.

A step reads the weights (of the experts those that its tokens choose) and the KV cache of every token held, and
computes each scheduled token; the slower of the two decides. Every layer adds the latency of its kernels and, under
tensor parallelism, two all-reduces. A step takes at least the host's time to launch it: as one CUDA graph, as piecewise
graphs between the attention layers, or kernel by kernel. The fits are in `step_fit.json` (measured steps,
`bench/simulate_fit.py`) and `step_link.json` (published multi-GPU runs, `bench/published_times.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from legroom.errors import LegroomError
from legroom.simulation.fast.accounting import min_host_seconds, step_seconds
from legroom.simulation.fast.rows import StepCost

if TYPE_CHECKING:
    from legroom.planning.plan import Plan
    from legroom.simulation.fast.rows import StepCost

Basis = Literal["measured", "data_sheet"]
"""The source of the estimate."""


@dataclass(frozen=True)
class StepBand:
    """Factors on the estimated seconds of a step that span the measured errors."""

    basis: Basis
    low: float
    high: float


def step_band(plan: Plan, work: Hardware) -> StepBand:
    """The error band of a plan's step time: narrow where measured, wide from data sheets, wider where the host limits
    even a full step."""
    data = _fit_data("step_band.json")
    measured, settings = data["measured"], plan.settings
    is_measured = (
        plan.target.gpu.name in measured["gpus"]
        and settings.tensor_parallel_size in measured["tensor_parallel_sizes"]
        and settings.engine in measured["engines"]
        and _weight_format(plan, work) in measured["weights"]
    )
    basis: Basis = "measured" if is_measured else "data_sheet"
    low, high = data[basis]["low"], data[basis]["high"]
    if _waits_for_host(roofline(work), settings.max_num_batched_tokens):
        low, high = min(low, data["host"]["low"]), max(high, data["host"]["high"])
    return StepBand(basis, low, high)


def _waits_for_host(cost: StepCost, tokens: int) -> bool:
    """Whether the host needs longer to launch a full prefill step than the GPU to compute it."""
    on_gpu = cost._replace(launch=0.0, launch_captured=0.0)
    return bool(step_seconds(on_gpu, tokens, tokens, 1) < min_host_seconds(cost, tokens, 1))  # type: ignore[no-untyped-call]


def why_untrusted(plan: Plan, work: Hardware) -> str:
    """Why no step time is estimated for this plan; empty where one is."""
    if work.flops_s <= 0:
        return "how fast it computes is not known, so no time is estimated"
    if work.all_reduces and not work.link_bytes_s:
        return str(_fit_data("step_band.json")["split"]["why_untrusted"])
    experts = _fit_data("step_band.json")["experts"]
    if work.expert_bytes and plan.target.model.name not in experts["measured_models"]:
        return str(experts["why_untrusted"])
    return ""


def _weight_format(plan: Plan, work: Hardware) -> str:
    if work.is_fp8:
        return "fp8"
    return "quantized" if plan.settings.quantization or plan.target.model.quantization else "16-bit"


@cache
def _fit_data(name: str) -> Any:
    return json.loads(resources.files("legroom.simulation").joinpath(name).read_text("utf-8"))


@dataclass(frozen=True)
class Efficiency:
    """The share of the data-sheet figures that kernels reach, and the seconds that layers, requests and the host
    add."""

    bandwidth_ratio: float
    kv_bandwidth_ratio: float
    expert_bandwidth_ratio: float
    flops_ratio: float
    fp8_flops_ratio: float
    attention_ratio: float
    """Of the card's 16-bit rate, in the attention of prompts."""
    layer_s: float
    request_s: float
    host_s: float
    """Of a step that is one CUDA graph; `host_request_s` more for every request."""
    host_request_s: float
    launch_layer_s: float
    """A layer whose kernels the host starts one by one."""
    captured_launch_layer_s: float
    """A layer of which all but the attention is in a CUDA graph."""
    expert_launch_factor: float
    """How much longer the host takes for a layer of experts."""


@dataclass(frozen=True)
class Hardware:
    """One rank: bytes to read and operations to compute, and the speed of the GPU."""

    weights_bytes: float
    """Read in every step."""
    kv_bytes_per_token: float
    flops_per_token: float
    bandwidth_bytes_s: float
    flops_s: float
    """At the precision that the linear layers compute in."""
    is_fp8: bool = False
    expert_bytes: float = 0.0
    """All routed experts."""
    expert_share: float = 1.0
    """Of the routed experts, those that one token chooses."""
    flops_per_pair: float = 0.0
    """Attention of one token to one other, over all layers that attend to everything."""
    attention_flops_s: float = 0.0
    """At the precision of attention; 0: the same as the linear layers."""
    layers: int = 0
    captured_tokens: int = 0
    """The largest CUDA graph; 0 without graphs."""
    all_reduces: int = 0
    """Of a step, where cards share its layers."""
    sent_bytes_per_token: float = 0.0
    """What a card sends in them."""
    link_bytes_s: float = 0.0


@dataclass(frozen=True)
class LinkEfficiency:
    """The share of the link's bandwidth that an all-reduce reaches, and its latency."""

    all_reduce_s: float
    bandwidth_ratio: float


def fitted_efficiency() -> Efficiency:
    """The fit to measured steps."""
    return Efficiency(**_fit_data("step_fit.json")["fitted"])


def roofline(
    hardware: Hardware, reached: Efficiency | None = None, exchanged: LinkEfficiency | None = None
) -> StepCost:
    """The step cost of one rank from its bytes, operations and the speed of the GPU."""
    reached, exchanged = (
        reached or fitted_efficiency(),
        exchanged or LinkEfficiency(**_fit_data("step_link.json")["fitted"]),
    )
    if hardware.bandwidth_bytes_s <= 0:
        raise LegroomError(
            "the bandwidth of this GPU is not known, so seconds cannot be estimated", "give --step-ms instead"
        )
    bandwidth, flops = hardware.bandwidth_bytes_s, hardware.flops_s
    rate = flops * (reached.fp8_flops_ratio if hardware.is_fp8 else reached.flops_ratio)
    attention = (hardware.attention_flops_s or flops) * reached.attention_ratio
    factor = reached.expert_launch_factor if hardware.expert_bytes else 1.0
    launch = reached.launch_layer_s * hardware.layers * factor
    link = hardware.link_bytes_s * exchanged.bandwidth_ratio
    return StepCost(
        overhead=reached.layer_s * hardware.layers + exchanged.all_reduce_s * hardware.all_reduces,
        token=hardware.flops_per_token / rate if rate > 0 else 0.0,
        weights=hardware.weights_bytes / (bandwidth * reached.bandwidth_ratio),
        kv_token=hardware.kv_bytes_per_token / (bandwidth * reached.kv_bandwidth_ratio),
        experts=hardware.expert_bytes / (bandwidth * reached.expert_bandwidth_ratio),
        idle=1.0 - hardware.expert_share,
        pair=hardware.flops_per_pair / attention if attention > 0 else 0.0,
        request=reached.request_s,
        host=reached.host_s if hardware.captured_tokens else launch,
        host_request=reached.host_request_s,
        launch=launch,
        launch_captured=reached.captured_launch_layer_s * hardware.layers * factor,
        captured=float(hardware.captured_tokens),
        exchange=hardware.sent_bytes_per_token / link if link > 0 else 0.0,
    )


def fixed_cost(step_s: float) -> StepCost:
    """A step cost that is the same for every step."""
    if not step_s > 0:
        raise LegroomError(f"a step cannot take {step_s * 1000:g} ms", "give --step-ms above 0")
    return StepCost(step_s, 0.0, 0.0, 0.0)


def calibrated(cost: StepCost, measured_step_s: float, running: float, tokens_held: float) -> StepCost:
    """Scale the cost to a measured mean time between tokens at so many running requests and tokens held.

    vLLM's metrics: `vllm:inter_token_latency_seconds` (before 0.11 `vllm:time_per_output_token_seconds`),
    `vllm:num_requests_running`, and the KV usage times the pool's tokens.
    """
    predicted = step_seconds(cost, running, tokens_held, running)  # type: ignore[no-untyped-call]
    if measured_step_s <= 0 or predicted <= 0:
        raise LegroomError("cannot calibrate on a step that takes no time", "measure while the server is busy")
    factor = measured_step_s / predicted
    return StepCost(*(part * factor for part in cost))._replace(idle=cost.idle, captured=cost.captured)
