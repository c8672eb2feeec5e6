"""The seconds of a step: a roofline and the host's share, fitted to measured steps.

A step reads the weights and the KV cache of every token held (of windows the last tokens alone), and computes each
scheduled token; the slower of the two decides. Beside that it reads the experts that its tokens choose, and updates the
recurrent state of every request. Every layer adds the latency of its kernels and, under tensor parallelism, its
all-reduces. A step takes at least the host's time to launch it: as one CUDA graph, as piecewise graphs between the
attention layers, or kernel by kernel. Fits: `step_fit.json` (measured steps, `bench/simulate_fit.py`),
`step_server.json` and `step_band.json` (published runs, `bench/published_times.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from legroom.errors import LegroomError
from legroom.facts import read_data
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

    @property
    def text(self) -> str:
        """A sentence on how far the estimated step times may be off, and why."""
        why = f" ({'; '.join(self.why_wide)})" if self.why_wide else ""
        return f"seconds are estimated: a step may take {self.low:g} to {self.high:g} times as long{why}"


def model_class(work: Hardware) -> str:
    """The class of model that selects the error band of step times: state-space, latent attention, experts or dense."""
    if work.state_layers or work.latent_layers:
        return "state-space" if work.state_layers else "latent attention"
    return "experts" if work.expert_layers else "dense"


def step_band(plan: Plan, work: Hardware) -> StepBand:
    """The error band of a plan's step time: narrow for measured kinds, wider for published ones, widest for others."""
    data, name, settings = read_data("step_band.json"), model_class(work), plan.settings
    measured, published = data["measured"], data["published"].get(name, data["published"]["experts"])
    fit = read_data("step_fit.json")
    on_gpu = fit["left_out_families"][name]["gpu"]["took"][1:3]
    on_host = fit["left_out_hosts"][name]["host"]["took"][1:3]
    why = why_unfamiliar(plan, work)
    if plan.target.gpu.name not in published["gpus"]:
        why.append(f"no run of such a model ({name}) on this card is known")
    asked = plan.target.gpu.name, settings.tensor_parallel_size, settings.release.version
    places = measured["gpus"], measured["tensor_parallel_sizes"], measured["releases"]
    is_measured = not why and all(each in known for each, known in zip(asked, places, strict=True))
    # A family that was left out may have taken less in every step; with it in the fit, 1 is possible too.
    bands = [(1.0, 1.0), on_gpu if is_measured else published["unknown" if why else "known"]["took"]]
    if not is_measured and (reason := why_other_maker(plan)):
        bands.append(data["elsewhere"]["took"])
        why.append(reason)
    if _waits_for_host(roofline(work, server=ServerEfficiency()), settings.max_num_batched_tokens):
        bands.append(on_host)
        why.append("the host takes longer to start the kernels of some steps than the GPU to compute them")
    lows, highs = zip(*bands, strict=True)
    return StepBand("measured" if is_measured else "data_sheet", min(lows), max(highs), tuple(why))


def why_unfamiliar(plan: Plan, work: Hardware) -> list[str]:
    """Clauses on what sets this server apart from the published loads against which step times were checked."""
    settings, measured = plan.settings, read_data("step_band.json")["measured"]
    reasons = {
        "the kernels for these weights, or this engine, were not measured": (
            settings.engine not in measured["engines"] or _weight_format(plan, work) not in measured["weights"]
        ),
        "how fast its cards exchange data is not known, and PCIe is assumed": work.all_reduces > 0
        and not work.link_bytes_s,
        "weights that every step reads over PCIe were not measured": bool(settings.given.cpu_offload_gb),
        "expert kernels of releases before 0.14 differ": work.expert_layers > 0
        and plan.target.release.before("0.14.0"),
    }
    return [reason for reason, applies in reasons.items() if applies]


def why_other_maker(plan: Plan) -> str:
    """A clause that few runs on cards of this maker are published; empty for NVIDIA's."""
    return "" if plan.target.gpu.vendor == "nvidia" else "few runs on cards of other makers than NVIDIA are known"


def _waits_for_host(cost: StepCost, tokens: int) -> bool:
    """Whether the host takes longer to launch a prefill of `tokens`, or one request's decode, than the GPU to run."""
    on_gpu = cost._replace(host=0.0, host_request=0.0, launch=0.0, launch_captured=0.0)
    return any(step_seconds(on_gpu, n, n, 1) < min_host_seconds(cost, n, 1) for n in (1, tokens))


def why_no_step_time(work: Hardware) -> str:
    """A clause on why no step time is estimated: the GPU's FLOP/s are not known; empty where it is."""
    return "" if work.flops_s > 0 else "how fast it computes is not known, so no time is estimated"


def _weight_format(plan: Plan, work: Hardware) -> str:
    """The number format of the weights: fp8, the quantization method, or 16-bit."""
    checkpoint = plan.target.model.quantization
    if work.is_fp8 and not (checkpoint and checkpoint.rules):
        return "fp8"
    return plan.settings.quantization or (checkpoint.method if checkpoint else "16-bit")


@dataclass(frozen=True)
class Efficiency:
    """The share of the data-sheet figures that kernels reach, and the seconds that layers, requests and host add."""

    bandwidth_ratio: float
    kv_bandwidth_ratio: float
    expert_bandwidth_ratio: float
    routed_bandwidth_ratio: float
    """Of activations between grouped GEMMs."""
    state_bandwidth_ratio: float
    """Of a decode that updates recurrent states."""
    wide_state_bandwidth_ratio: float
    """The same with more than 128 elements a channel, for which vLLM has no tuned kernel."""
    scan_bandwidth_ratio: float
    """For every token of a prompt, as if the states had 16 bits."""
    flops_ratio: float
    fp8_flops_ratio: float
    fp8_block_flops_ratio: float
    expert_flops_factor: float
    """Grouped GEMMs against dense ones."""
    attention_ratio: float
    """Of the card's 16-bit rate, in the attention of prompts."""
    layer_s: float
    expert_layer_s: float
    """What routing adds to a layer, and shared experts in turn."""
    shared_expert_layer_s: float
    quantized_expert_layer_s: float
    """Experts in 8 bits or fewer add this."""
    request_s: float
    attention_head_s: float
    """Attention of one request that decodes, for every KV head of a layer, beside reading its cache."""
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
    scan_launch_layer_s: float
    latent_launch_layer_s: float
    """Also between CUDA graphs."""
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
    is_other_maker: bool = False
    latency_ratio: float = 1.0
    """Of its kernels' latency to the measured card's: their clocks, the other way round."""
    is_fp8: bool = False
    is_block_scaled: bool = False
    expert_bytes: float = 0.0
    """All routed experts."""
    has_quantized_experts: bool = False
    """In 8 bits or fewer, beside kernels that quantize activations."""
    has_deep_gemm_experts: bool = False
    has_unpacked_experts: bool = False
    """4-bit weights become 16-bit ones in the kernel that multiplies them."""
    shared_expert_layers: int = 0
    expert_share: float = 1.0
    """Of the routed experts, those that one token chooses."""
    expert_flops_per_token: float = 0.0
    routed_bytes_per_token: float = 0.0
    """Activations between the grouped GEMMs, written and read; `activation_bytes_per_token` between the others."""
    activation_bytes_per_token: float = 0.0
    window_bytes_per_token: float = 0.0
    """KV cache of the layers that attend to the last `window` tokens."""
    window: float = 0.0
    state_elements: float = 0.0
    """Recurrent states of one request; `state_bytes` as they are stored."""
    state_bytes: float = 0.0
    has_wide_states: bool = False
    flops_per_pair: float = 0.0
    """Attention of one token to one other, over all layers that attend to everything."""
    window_flops_per_pair: float = 0.0
    decode_flops_per_pair: float = 0.0
    """The same in a decode of latent attention, whose heads all multiply the whole latent."""
    attention_flops_s: float = 0.0
    """At the precision of attention; 0: the same as the linear layers."""
    kv_heads: int = 0
    """Of all layers together."""
    layers: float = 0
    """Mixers and feed-forward blocks, two a layer."""
    expert_layers: int = 0
    latent_layers: int = 0
    state_layers: int = 0
    scan_layers: int = 0
    """Recurrent layers that do more than convolve the last few tokens."""
    mixers: int = 0
    """Attention and recurrent layers: none of them is in a piecewise CUDA graph."""
    kv_groups: int = 1
    captured_tokens: int = 0
    """The largest CUDA graph; 0 without graphs."""
    is_async: bool = True
    all_reduces: int = 0
    """Of a step, where cards share its layers."""
    sent_bytes_per_token: float = 0.0
    """What a card sends in them."""
    link_bytes_s: float = 0.0
    pcie_bytes_s: float = 0.0
    """Of cards without a known link."""
    ring_hops: int = 0
    """From the first of the cards that share layers to the last."""
    is_networked: bool = False
    """Each of them is a machine of its own."""


@dataclass(frozen=True)
class ServerEfficiency:
    """How servers differ from the measured process, which the defaults are."""

    all_reduce_s: float = 0.0
    bandwidth_ratio: float = 1.0
    pcie_hop_s: float = 0.0
    """NCCL's rings pass every all-reduce from card to card; `network_hop_s` between machines."""
    pcie_ratio: float = 1.0
    sync_s: float = 0.0
    """The GPU waits for a scheduler that is not asynchronous, `sync_request_s` longer for every request."""
    sync_request_s: float = 0.0
    host_ratio: float = 1.0
    """What starting a step takes; `host_request_ratio`: what every request adds."""
    host_request_ratio: float = 1.0
    choice_exponent: float = 1.0
    """Tokens of real text choose as many experts as tokens ** choice_exponent independent ones."""
    network_hop_s: float = 0.0
    unpacked_rows: float = 0.0
    """An expert whose 4-bit weights are unpacked takes at least as long as computing so many tokens."""
    deep_gemm_layer_s: float = 0.0
    """What sorting tokens by expert for DeepGEMM, and back, adds to a layer."""
    expert_launch_ratio: float = 1.0
    """What starting the kernels of routed experts takes, beside `host_ratio`."""
    other_maker_ratio: float = 1.0
    """Of a step on cards of other makers than NVIDIA to what their data sheets let expect."""


def roofline(hardware: Hardware, reached: Efficiency | None = None, server: ServerEfficiency | None = None) -> StepCost:
    """The step cost of one rank on its GPU; LegroomError where its memory bandwidth is not known. `reached`, `server`:
    efficiencies to use instead of the fitted ones."""
    reached = reached or Efficiency(**read_data("step_fit.json")["fitted"])
    server = server or ServerEfficiency(**read_data("step_server.json")["fitted"])
    if hardware.bandwidth_bytes_s <= 0:
        hint = "give --step-ms instead"
        raise LegroomError("the bandwidth of this GPU is not known, so seconds cannot be estimated", hint)
    slower = server.other_maker_ratio if hardware.is_other_maker else 1.0
    bandwidth, latency_ratio = hardware.bandwidth_bytes_s / slower, hardware.latency_ratio * slower
    ratio = reached.fp8_flops_ratio if hardware.is_fp8 else reached.flops_ratio
    rate = hardware.flops_s / slower * (reached.fp8_block_flops_ratio if hardware.is_block_scaled else ratio)
    attention = (hardware.attention_flops_s or hardware.flops_s) / slower * reached.attention_ratio or math.inf
    launch = (
        reached.launch_s
        + reached.launch_layer_s * hardware.layers
        + reached.expert_launch_layer_s * hardware.expert_layers * server.expert_launch_ratio
        + reached.scan_launch_layer_s * hardware.scan_layers
        + (latent_launch := reached.latent_launch_layer_s * hardware.latent_layers)
    )
    host = reached.host_s + reached.host_group_s * (hardware.kv_groups - 1)
    host_request = reached.host_request_s + reached.host_group_request_s * (hardware.kv_groups - 1)
    sync, sync_request = (0.0, 0.0) if hardware.is_async else (server.sync_s, server.sync_request_s)
    hop_s = server.network_hop_s if hardware.is_networked else server.pcie_hop_s
    all_reduce_s = server.all_reduce_s if hardware.link_bytes_s else hop_s * hardware.ring_hops
    link = hardware.link_bytes_s * server.bandwidth_ratio or hardware.pcie_bytes_s * server.pcie_ratio or math.inf
    expert_flops = hardware.expert_flops_per_token / reached.expert_flops_factor
    unpacked_flops = hardware.has_unpacked_experts * server.unpacked_rows * expert_flops / hardware.expert_share
    kv_read = bandwidth * reached.kv_bandwidth_ratio
    expert_layer_s = reached.expert_layer_s + reached.quantized_expert_layer_s * hardware.has_quantized_experts
    expert_layer_s += server.deep_gemm_layer_s * hardware.has_deep_gemm_experts
    layers_s = reached.layer_s * hardware.layers + expert_layer_s * hardware.expert_layers
    state_ratio = reached.wide_state_bandwidth_ratio if hardware.has_wide_states else reached.state_bandwidth_ratio
    return StepCost(
        overhead=(layers_s + reached.shared_expert_layer_s * hardware.shared_expert_layers) * latency_ratio
        + all_reduce_s * hardware.all_reduces
        + sync,
        token=(hardware.flops_per_token + expert_flops) / (rate or math.inf)
        + hardware.routed_bytes_per_token / (bandwidth * reached.routed_bandwidth_ratio)
        + hardware.activation_bytes_per_token / (bandwidth * reached.bandwidth_ratio)
        + 4 * hardware.state_elements / (bandwidth * reached.scan_bandwidth_ratio),
        weights=hardware.weights_bytes / (bandwidth * reached.bandwidth_ratio),
        kv_token=max(hardware.kv_bytes_per_token / kv_read, hardware.decode_flops_per_pair / attention),
        experts=max(
            hardware.expert_bytes / (bandwidth * reached.expert_bandwidth_ratio), unpacked_flops / (rate or math.inf)
        ),
        idle=1.0 - hardware.expert_share,
        pair=hardware.flops_per_pair / attention,
        window_pair=hardware.window_flops_per_pair / attention,
        request=(reached.request_s + reached.attention_head_s * hardware.kv_heads) * latency_ratio
        + 2 * hardware.state_bytes / (bandwidth * state_ratio)  # read and written
        + sync_request,
        host=server.host_ratio * (host if hardware.captured_tokens else launch) + sync,
        host_request=server.host_request_ratio * host_request + sync_request,
        launch=server.host_ratio * launch + sync,
        launch_captured=server.host_ratio * (host + reached.captured_launch_layer_s * hardware.mixers + latent_launch)
        + sync,
        captured=float(hardware.captured_tokens),
        exchange=hardware.sent_bytes_per_token / link,
        window=hardware.window,
        window_token=hardware.window_bytes_per_token / kv_read,
        choice_exponent=server.choice_exponent,
    )


def limit_of_data_sheet(hardware: Hardware) -> StepCost:
    """The cost of a step that reads and computes as fast as the card's data sheet allows: no step takes less."""
    fitted = read_data("step_fit.json")["fitted"]
    return roofline(
        hardware, Efficiency(**{name: float(not name.endswith("_s")) for name in fitted}), ServerEfficiency()
    )


def fixed_cost(step_s: float) -> StepCost:
    """A step cost of `step_s` seconds for every step, whatever it computes; LegroomError unless above 0."""
    if not step_s > 0:
        raise LegroomError(f"a step cannot take {step_s * 1000:g} ms", "give --step-ms above 0")
    return StepCost(step_s, 0.0, 0.0, 0.0)


def calibrated(cost: StepCost, measured_step_s: float, running: float, tokens_held: float) -> StepCost:
    """The cost scaled so that decoding `running` requests that hold `tokens_held` tokens together takes
    `measured_step_s` a step; LegroomError for a time of 0."""
    # vLLM's metrics: `vllm:inter_token_latency_seconds` (before 0.11 `vllm:time_per_output_token_seconds`),
    # `vllm:num_requests_running`, and the KV usage times the pool's tokens.
    predicted = step_seconds(cost, running, tokens_held, running)
    if measured_step_s <= 0 or predicted <= 0:
        raise LegroomError("cannot calibrate on a step that takes no time", "measure while the server is busy")
    factor = measured_step_s / predicted
    return StepCost(*(part * factor for part in cost))._replace(
        idle=cost.idle, captured=cost.captured, window=cost.window, choice_exponent=cost.choice_exponent
    )
