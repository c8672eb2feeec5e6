"""The seconds of a step: a roofline and the host's share, fitted to measured steps.

A step reads the weights and the KV cache of every token held (of windows the last tokens alone), and computes each
scheduled token; the slower of the two decides. Beside that it reads the experts that its tokens choose, and updates the
recurrent state of every request. Every layer adds the latency of its kernels and, under tensor parallelism, its
all-reduces. A step takes at least the host's time to launch it: as one CUDA graph, as piecewise graphs between the
attention layers, or kernel by kernel. The fits are in `step_fit.json` (measured steps, `bench/simulate_fit.py`),
`step_link.json` and `step_band.json` (published runs, `bench/published_times.py`).
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

Basis = Literal["measured", "data_sheet"]
"""The source of the estimate."""


@dataclass(frozen=True)
class StepBand:
    """Factors on the estimated seconds of a step between which nine of ten measurements lie."""

    basis: Basis
    low: float
    high: float
    why_wide: tuple[str, ...] = ()


def class_of(work: Hardware) -> str:
    """The model class of step-time errors: "state-space", "latent attention", "experts" or "dense"."""
    if work.state_layers:
        return "state-space"
    if work.decode_flops_per_pair:
        return "latent attention"
    return "experts" if work.expert_layers else "dense"


def step_band(plan: Plan, work: Hardware) -> StepBand:
    """The error band of a plan's step time: narrow where measured, wider from published loads, else widest."""
    data, name, settings = _fit_data("step_band.json"), class_of(work), plan.settings
    measured, published = data["measured"], data["published"].get(name, data["published"]["experts"])
    left_out = _fit_data("step_fit.json")["left_out_families"][name]
    on_gpu, on_host = (left_out[part]["took"][1:3] for part in ("gpu", "host"))
    reasons = {
        f"no run of such a model ({name}) on this card is known": plan.target.gpu.name not in published["gpus"],
        "the kernels for these weights, or this engine, were not measured": (
            settings.engine not in measured["engines"] or _weight_format(plan, work) not in measured["weights"]
        ),
        "how fast its cards exchange data is not known, and PCIe is assumed": bool(
            work.all_reduces and not work.link_bytes_s
        ),
    }
    why = [reason for reason, applies in reasons.items() if applies]
    is_measured = (
        not why
        and plan.target.gpu.name in measured["gpus"]
        and settings.tensor_parallel_size in measured["tensor_parallel_sizes"]
        and settings.release in measured["releases"]
    )
    basis: Basis = "measured" if is_measured else "data_sheet"
    # A family that was left out may have taken less in every step; with it in the fit, 1 is possible too.
    bands = [(1.0, 1.0), on_gpu if is_measured else published["unknown" if why else "known"]]
    if reason := why_elsewhere(plan):
        bands.append(data["elsewhere"]["took"])
        why.append(reason)
    if not is_measured and name not in data["published"]:
        bands.append(on_gpu)
        why.append(f"too few loads of models of this kind ({name}) are published")
    if _waits_for_host(roofline(work), settings.max_num_batched_tokens):
        bands.append(on_host)
        why.append("the host takes longer to start the kernels of some steps than the GPU to compute them")
    return StepBand(basis, min(low for low, _ in bands), max(high for _, high in bands), tuple(why))


def why_elsewhere(plan: Plan) -> str:
    """Why this server differs from the measured runs (no NVIDIA GPU, old release), as a clause; else empty."""
    if not plan.target.gpu.name.startswith("NVIDIA "):
        return "few runs on cards of other makers than NVIDIA are known"
    is_old = plan.target.release.before("0.11.0")
    return "few runs of releases before 0.11 are known, and their kernels differ" if is_old else ""


def _waits_for_host(cost: StepCost, tokens: int) -> bool:
    """Whether the host needs longer to launch a full prefill step, or the decode of one request, than the GPU."""
    on_gpu = cost._replace(host=0.0, host_request=0.0, launch=0.0, launch_captured=0.0)
    return any(step_seconds(on_gpu, n, n, 1) < min_host_seconds(cost, n, 1) for n in (1, tokens))  # type: ignore[no-untyped-call]


def why_untrusted(work: Hardware) -> str:
    """Why no step time is estimated (the GPU's FLOP/s are unknown), as a clause; empty where one is."""
    return "" if work.flops_s > 0 else "how fast it computes is not known, so no time is estimated"


def _weight_format(plan: Plan, work: Hardware) -> str:
    """The number format of the weights: fp8, the quantization method, or 16-bit."""
    if work.is_fp8:
        return "fp8"
    method = plan.settings.quantization
    if method is None and plan.target.model.quantization:
        method = plan.target.model.quantization.method
    return method or "16-bit"


@cache
def _fit_data(name: str) -> Any:
    """The contents of a JSON data file of this package."""
    return json.loads(resources.files("legroom.simulation").joinpath(name).read_text("utf-8"))


@dataclass(frozen=True)
class Efficiency:
    """The share of the data-sheet figures that kernels reach, and the seconds that layers, requests and the host
    add."""

    bandwidth_ratio: float
    kv_bandwidth_ratio: float
    expert_bandwidth_ratio: float
    quantized_expert_bandwidth_ratio: float
    """Of experts stored in 8 bits or fewer."""
    state_bandwidth_ratio: float
    """Of a decode that updates recurrent states, as if they had 16 bits."""
    scan_bandwidth_ratio: float
    """The same, for every token of a prompt."""
    flops_ratio: float
    fp8_flops_ratio: float
    fp8_block_flops_ratio: float
    expert_flops_factor: float
    """Grouped GEMMs against dense ones."""
    attention_ratio: float
    """Of the card's 16-bit rate, in the attention of prompts."""
    layer_s: float
    expert_layer_s: float
    """What routing adds to a layer."""
    request_s: float
    host_s: float
    """Of a step that is one CUDA graph; `host_request_s` more for every request."""
    host_request_s: float
    host_group_s: float
    """For every KV cache group after the first; `host_group_request_s` more for every request."""
    host_group_request_s: float
    launch_s: float
    """A step whose kernels the host starts one by one; then every layer adds its own."""
    launch_layer_s: float
    expert_launch_layer_s: float
    state_launch_layer_s: float
    captured_launch_layer_s: float
    """An attention or recurrent layer between two CUDA graphs."""


@dataclass(frozen=True)
class Hardware:
    """One rank: bytes to read and operations to compute, and the speed of the GPU."""

    weights_bytes: float
    """Read in every step."""
    kv_bytes_per_token: float
    """Of the layers that attend to everything."""
    flops_per_token: float
    bandwidth_bytes_s: float
    flops_s: float
    """At the precision that the linear layers compute in."""
    is_fp8: bool = False
    is_block_scaled: bool = False
    expert_bytes: float = 0.0
    """All routed experts."""
    has_quantized_experts: bool = False
    expert_share: float = 1.0
    """Of the routed experts, those that one token chooses."""
    expert_flops_per_token: float = 0.0
    routed_bytes_per_token: float = 0.0
    """Activations between the grouped GEMMs, written and read."""
    window_bytes_per_token: float = 0.0
    """KV cache of the layers that attend to the last `window` tokens."""
    window: float = 0.0
    state_elements: float = 0.0
    """Recurrent states of one request."""
    flops_per_pair: float = 0.0
    """Attention of one token to one other, over all layers that attend to everything."""
    decode_flops_per_pair: float = 0.0
    """The same in a decode of latent attention, whose heads all multiply the whole latent."""
    attention_flops_s: float = 0.0
    """At the precision of attention; 0: the same as the linear layers."""
    layers: float = 0
    """Mixers and feed-forward blocks, two a layer."""
    expert_layers: int = 0
    state_layers: int = 0
    mixers: int = 0
    """Attention and recurrent layers: none of them is in a piecewise CUDA graph."""
    kv_groups: int = 1
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
    pcie_bytes_s: float = 32e9
    """PCIe 4.0 with 16 lanes, one way: for cards whose link is not known."""


def fitted_efficiency() -> Efficiency:
    """The kernel efficiencies and overheads fitted to measured step times, from the package's data."""
    return Efficiency(**_fit_data("step_fit.json")["fitted"])


def roofline(
    hardware: Hardware, reached: Efficiency | None = None, exchanged: LinkEfficiency | None = None
) -> StepCost:
    """The step cost of one rank from its bytes, FLOPs and GPU; `reached`, `exchanged`: other than fitted efficiency."""
    reached = reached or fitted_efficiency()
    exchanged = exchanged or LinkEfficiency(**_fit_data("step_link.json")["fitted"])
    if hardware.bandwidth_bytes_s <= 0:
        raise LegroomError(
            "the bandwidth of this GPU is not known, so seconds cannot be estimated", "give --step-ms instead"
        )
    bandwidth = hardware.bandwidth_bytes_s
    ratio = reached.fp8_flops_ratio if hardware.is_fp8 else reached.flops_ratio
    rate = hardware.flops_s * (reached.fp8_block_flops_ratio if hardware.is_block_scaled else ratio)
    attention = (hardware.attention_flops_s or hardware.flops_s) * reached.attention_ratio
    launch = (
        reached.launch_s
        + reached.launch_layer_s * hardware.layers
        + reached.expert_launch_layer_s * hardware.expert_layers
        + reached.state_launch_layer_s * hardware.state_layers
    )
    host = reached.host_s + reached.host_group_s * (hardware.kv_groups - 1)
    link = (hardware.link_bytes_s or exchanged.pcie_bytes_s) * exchanged.bandwidth_ratio
    flops = hardware.flops_per_token + hardware.expert_flops_per_token / reached.expert_flops_factor
    state_bytes = 4 * hardware.state_elements  # 16 bits, read and written
    kv_read = bandwidth * reached.kv_bandwidth_ratio
    quantized = hardware.has_quantized_experts
    expert_ratio = reached.quantized_expert_bandwidth_ratio if quantized else reached.expert_bandwidth_ratio
    return StepCost(
        overhead=reached.layer_s * hardware.layers
        + reached.expert_layer_s * hardware.expert_layers
        + exchanged.all_reduce_s * hardware.all_reduces,
        token=(flops / rate if rate > 0 else 0.0)
        + hardware.routed_bytes_per_token / (bandwidth * reached.expert_bandwidth_ratio)
        + state_bytes / (bandwidth * reached.scan_bandwidth_ratio),
        weights=hardware.weights_bytes / (bandwidth * reached.bandwidth_ratio),
        kv_token=max(
            hardware.kv_bytes_per_token / kv_read, hardware.decode_flops_per_pair / attention if attention > 0 else 0.0
        ),
        experts=hardware.expert_bytes / (bandwidth * expert_ratio),
        idle=1.0 - hardware.expert_share,
        pair=hardware.flops_per_pair / attention if attention > 0 else 0.0,
        request=reached.request_s + state_bytes / (bandwidth * reached.state_bandwidth_ratio),
        host=host if hardware.captured_tokens else launch,
        host_request=reached.host_request_s + reached.host_group_request_s * (hardware.kv_groups - 1),
        launch=launch,
        launch_captured=host + reached.captured_launch_layer_s * hardware.mixers,
        captured=float(hardware.captured_tokens),
        exchange=hardware.sent_bytes_per_token / link if link > 0 else 0.0,
        window=hardware.window,
        window_token=hardware.window_bytes_per_token / kv_read,
    )


def fixed_cost(step_s: float) -> StepCost:
    """A step cost of `step_s` seconds for every step, whatever it computes."""
    if not step_s > 0:
        raise LegroomError(f"a step cannot take {step_s * 1000:g} ms", "give --step-ms above 0")
    return StepCost(step_s, 0.0, 0.0, 0.0)


def calibrated(cost: StepCost, measured_step_s: float, running: float, tokens_held: float) -> StepCost:
    """Scale the cost to a measured mean time between tokens at so many running requests and tokens held."""
    # vLLM's metrics: `vllm:inter_token_latency_seconds` (before 0.11 `vllm:time_per_output_token_seconds`),
    # `vllm:num_requests_running`, and the KV usage times the pool's tokens.
    predicted = step_seconds(cost, running, tokens_held, running)  # type: ignore[no-untyped-call]
    if measured_step_s <= 0 or predicted <= 0:
        raise LegroomError("cannot calibrate on a step that takes no time", "measure while the server is busy")
    factor = measured_step_s / predicted
    return StepCost(*(part * factor for part in cost))._replace(
        idle=cost.idle, captured=cost.captured, window=cost.window
    )
