"""Scheduler settings and step costs of a planned server."""

from collections import Counter
from typing import Any, NamedTuple

from legroom.facts.model import Attention, Experts, latent, recurrent
from legroom.memory.kv.groups import CacheGroup
from legroom.memory.kv.layer_specs import state_elements
from legroom.memory.kv.specs import ChunkedLocalSpec, CrossAttentionSpec, SlidingWindowSpec, StateSpec
from legroom.memory.weights.loaded import offload_marks, stored_modules
from legroom.planning.plan import Plan
from legroom.simulation.scheduler_settings import LayerGroup
from legroom.simulation.step_time import Hardware
from legroom.simulation.trace import Trace
from legroom.units import cdiv
from legroom.vllm.args import WITHOUT_CACHE, draft_method

_NOT_READ_BY_A_STEP = ("embeddings", "encoder", "buffers", "workspace", "lora")
_SCHEDULER_SETTINGS = (
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching", "enable_chunked_prefill"),
    *("async_scheduling", "engine"),
)
_MEASURED_CLOCK_HZ = 1.98e9  # Of the H200 on which the latency of kernels was measured.


class PlannedScheduler(NamedTuple):
    """Fields of `SchedulerSettings` as the plan resolves them, and notes for the user."""

    flags: dict[str, Any]
    notes: tuple[str, ...]


def planned_scheduler(plan: Plan) -> PlannedScheduler:
    """A planned server's scheduler settings (blocks, token budgets, KV cache groups), with notes for the user."""
    settings, kv = plan.settings, plan.memory.kv
    doubt = "" if plan.starts else " and may not start"
    start_note = (f"such a server is tight{doubt}: {plan.reason}",) if plan.verdict == "tight" else ()
    flags: dict[str, Any] = {
        "num_blocks": kv.num_blocks,
        "block_size": kv.block_size,
        **{name: getattr(settings, name) for name in _SCHEDULER_SETTINGS},
    }
    if settings.engine == "V0":
        flags["watermark"] = 0.01
        return PlannedScheduler(flags, (_settings_note(flags), *start_note))
    groups = [_layer_group(group, kv.block_size) for group in kv.shape.groups]
    flags["groups"] = tuple(group for group, _ in groups) or (LayerGroup(),)
    flags["num_speculative_tokens"] = settings.num_speculative_tokens
    flags["draft_needs_kv"] = draft_method(settings.given.speculative_config) not in WITHOUT_CACHE
    notes = []
    kinds = Counter(kind for _, kind in groups)
    if len(groups) > 1 or any(kind != "full attention" for kind in kinds):
        counted = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        notes.append(f"groups of layers that share the pool: {counted}")
    if any(isinstance(group.spec, ChunkedLocalSpec) for group in kv.shape.groups):
        notes.append("attention in chunks is simulated as a sliding window of a chunk: it holds a little more")
    if any(group.fixed_blocks or group.block_size for group in flags["groups"]) and flags["enable_prefix_caching"]:
        flags["enable_prefix_caching"] = False
        notes.append("prefix caching over recurrent states or blocks of several sizes is not simulated: it is left off")
    return PlannedScheduler(flags, (_settings_note(flags), *start_note, *notes))


def as_one_group(trace: Trace, flags: dict[str, Any]) -> dict[str, Any]:
    """Scheduler settings `flags` with one full-attention group that holds as many mean requests; faster to replay."""
    mean = max(1, (sum(trace.prompt_lens) + sum(trace.output_lens)) // len(trace))
    request_blocks = 0
    for group in flags["groups"]:
        size = group.block_size or flags["block_size"]
        whole, window = cdiv(mean, size), group.sliding_window
        request_blocks += group.fixed_blocks or (whole if window is None else min(whole, cdiv(window, size) + 1))
    blocks = max(2, flags["num_blocks"] * cdiv(mean, flags["block_size"]) // request_blocks)
    return {**flags, "groups": (LayerGroup(),), "num_blocks": blocks}


def _layer_group(group: CacheGroup, block_size: int) -> tuple[LayerGroup, str]:
    """(the simulated group for a KV cache group, a text that describes it); `block_size`: that of the other groups."""
    spec = group.spec
    if isinstance(spec, StateSpec):
        blocks = spec.request_blocks or 1
        return LayerGroup(fixed_blocks=blocks), f"recurrent state ({blocks} block{'s' if blocks > 1 else ''} a request)"
    if isinstance(spec, CrossAttentionSpec):
        return LayerGroup(fixed_blocks=spec.blocks(0)), f"cross attention ({spec.blocks(0)} blocks a request)"
    own_size = None if group.block_size == block_size else group.block_size
    size = f" in blocks of {own_size}" if own_size else ""
    if isinstance(spec, SlidingWindowSpec):
        return LayerGroup(spec.window, block_size=own_size), f"sliding window {spec.window:,}{size}"
    if isinstance(spec, ChunkedLocalSpec):
        return LayerGroup(spec.chunk, block_size=own_size), f"chunks of {spec.chunk:,}{size}"
    return LayerGroup(block_size=own_size), f"full attention{size}"


def _settings_note(flags: dict[str, Any]) -> str:
    """A line for the user that lists the scheduler settings taken from the plan (`flags`)."""
    words = [
        f"{flags['num_blocks']:,} blocks of {flags['block_size']} tokens",
        f"max-num-seqs {flags['max_num_seqs']:,}",
        f"max-num-batched-tokens {flags['max_num_batched_tokens']:,}",
        f"max-model-len {flags['max_model_len']:,}",
    ]
    words += [
        what + (" on" if flags[name] else " off")
        for name, what in (
            ("enable_prefix_caching", "prefix caching"),
            ("enable_chunked_prefill", "chunked prefill"),
            ("async_scheduling", "asynchronous scheduling"),
        )
    ]
    if flags.get("num_speculative_tokens"):
        words.append(f"{flags['num_speculative_tokens']} speculative tokens")
    return f"from the plan ({flags['engine']} engine): {', '.join(words)}"


def hardware(plan: Plan) -> Hardware:
    """What one tensor-parallel rank, over all pipeline stages, reads and computes per step, and its GPU's speed."""
    model, settings, gpu = plan.target.model, plan.settings, plan.target.gpu
    # --cpu-offload-gb: every step reads what it moved over PCIe, at a fraction of the card's bandwidth.
    pcie_ratio = 1.0 if gpu.unified or not gpu.pcie_bytes_s else max(1.0, gpu.bandwidth_bytes_s / gpu.pcie_bytes_s)
    weights_bytes = expert_bytes = expert_stored = expert_elements = flops = 0.0
    for stage in range(settings.pipeline_parallel_size):
        modules = stored_modules(model, settings, gpu, stage)
        for stored_module, is_offloaded in zip(modules, offload_marks(modules, settings), strict=True):
            part, stored = stored_module.module.part, float(sum(stored_module.storage.kept))
            slower = pcie_ratio if is_offloaded else 1.0
            # Tied embeddings are read once a step for the logits; others are only looked up.
            if part in _NOT_READ_BY_A_STEP and not (part == "embeddings" and model.tie_word_embeddings):
                continue
            if part == "experts":
                expert_bytes += stored * slower
                expert_stored += stored
                expert_elements += stored_module.module.elements
                continue
            weights_bytes += stored * slower
            # Logits are computed only for the last token of a prompt.
            if part not in ("embeddings", "lm_head"):
                flops += 2.0 * stored_module.module.elements
    split = settings.tensor_parallel_size
    mixers = [mixer for layer in model.layers for mixer in (layer.mixer, *layer.also) if mixer is not None]
    blocks = [layer.feedforward for layer in model.layers if layer.feedforward is not None]
    experts = [block for block in blocks if isinstance(block, Experts)]
    num_experts = sum(block.num_experts for block in experts)
    expert_share = sum(block.experts_per_token for block in experts) / num_experts if experts else 1.0
    states = recurrent(mixers)
    pairs = [(mixer.sees_everything, 2.0 * mixer.heads * mixer.score_width) for mixer in mixers]
    # Each adds what the ranks computed of it: after attention, and after the MLP.
    all_reduces = len(mixers) + len(blocks) if split > 1 else 0
    # Weights and activations are both FP8, in the checkpoint or by online quantization.
    scheme, online = model.quantization, (settings.quantization or "").startswith("fp8")
    is_fp8 = gpu.fp8_flops > 0 and (scheme.weight_bits == 8 and scheme.number == "float" if scheme else online)
    return Hardware(
        weights_bytes=weights_bytes,
        flops_per_token=flops,
        bandwidth_bytes_s=gpu.bandwidth_bytes_s,
        is_other_maker=gpu.vendor != "nvidia",
        latency_ratio=_MEASURED_CLOCK_HZ / gpu.clock_hz if gpu.clock_hz else 1.0,
        flops_s=gpu.fp8_flops if is_fp8 else gpu.bf16_flops,
        is_fp8=is_fp8,
        is_block_scaled=is_fp8 and scheme is not None and scheme.block is not None,
        expert_bytes=expert_bytes,
        expert_share=expert_share,
        # 8 bits and their scales, or fewer.
        has_quantized_experts=expert_stored < 1.5 * expert_elements and not _has_fused_experts(plan),
        expert_flops_per_token=2.0 * expert_elements * expert_share,
        # The activation reads two widths and writes one, a sum reads what the second GEMM wrote; 16 bits each.
        routed_bytes_per_token=sum(
            2.0 * block.experts_per_token * (2 * block.hidden_size + 3 * block.intermediate_size / split)
            for block in experts
        ),
        # Norms and residuals, rotary embeddings, and activation functions; 16 bits each.
        activation_bytes_per_token=2.0
        * (
            4 * model.hidden_size * (len(mixers) + len(blocks))
            + sum(mixer.heads * mixer.score_width for mixer in mixers) / split
            + sum(3 * getattr(block, "shared_intermediate_size", block.intermediate_size) for block in blocks) / split
        ),
        **_kv_read_bytes(plan),
        state_elements=float(sum(state_elements(mixer, settings) for mixer in states)),
        flops_per_pair=sum(pair_flops for sees_everything, pair_flops in pairs if sees_everything) / split,
        window_flops_per_pair=sum(pair_flops for sees_everything, pair_flops in pairs if not sees_everything) / split,
        decode_flops_per_pair=sum(
            2.0 * mixer.heads * (mixer.latent_width + mixer.kv_lora_rank) / split
            for mixer in latent(mixers)
            if not mixer.index_heads
        ),
        attention_flops_s=gpu.bf16_flops,
        layers=(len(mixers) + len(blocks)) / 2,
        expert_layers=len(experts),
        has_deep_gemm_experts=_has_deep_gemm_experts(plan),
        has_unpacked_experts=scheme is not None and scheme.method == "mxfp4" and gpu.compute_capability == (9, 0),
        shared_expert_layers=sum(block.shared_intermediate_size > 0 for block in experts),
        latent_layers=len(latent(mixers)),
        state_layers=len(states),
        scan_layers=sum(mixer.kind != "short_conv" for mixer in states),
        has_wide_states=any(dict(mixer.config).get("state_size", 0) > 128 for mixer in states),
        kv_heads=sum(max(1, mixer.kv_heads // split) for mixer in mixers if isinstance(mixer, Attention)),
        mixers=len(mixers),
        kv_groups=max(1, len(plan.memory.kv.shape.groups)),
        all_reduces=all_reduces,
        # A ring all-reduce sends each element twice, in 16 bits.
        sent_bytes_per_token=all_reduces * 2 * (1 - 1 / split) * model.hidden_size * 2,
        link_bytes_s=gpu.link_bytes_s,
        pcie_bytes_s=gpu.pcie_bytes_s,
        ring_hops=split - 1,
        is_networked=gpu.interconnect == "none",
        captured_tokens=0 if settings.enforce_eager else max(settings.cudagraph_capture_sizes, default=0),
        is_async=settings.async_scheduling,
    )


def _has_fused_experts(plan: Plan) -> bool:
    """Whether the experts' GEMMs quantize activations themselves or need not: from 0.11 on, with 4-bit integer weights
    (Marlin) or with MXFP4 on data-center Blackwell (FlashInfer)."""
    scheme, gpu = plan.target.model.quantization, plan.target.gpu
    if scheme is None or plan.target.release.before("0.11.0"):
        return False
    is_blackwell = gpu.vendor == "nvidia" and gpu.compute_capability[0] == 10
    return (scheme.number == "int" and scheme.weight_bits == 4) or (scheme.method == "mxfp4" and is_blackwell)


def _has_deep_gemm_experts(plan: Plan) -> bool:
    """Whether DeepGEMM multiplies the experts, not Triton or FlashInfer: FP8 blocks from 0.11 on, before 0.17 on Hopper
    and 0.16 on Blackwell; from 0.12 on only where fewer than eight ranks split each expert."""
    scheme, release, settings = plan.target.model.quantization, plan.target.release, plan.settings
    last = {(9, 0): "0.17.0", (10, 0): "0.16.0"}.get(plan.target.gpu.compute_capability)
    if not last or scheme is None or scheme.method != "fp8" or scheme.block is None or release.before("0.11.0"):
        return False
    is_split = settings.tensor_parallel_size >= 8 and not settings.enable_expert_parallel
    return release.before(last) and not (is_split and release.at_least("0.12.0"))


def _kv_read_bytes(plan: Plan) -> dict[str, float]:
    """Fields of `Hardware`: KV bytes of a cached token (full attention, windowed), state bytes, the mean window."""
    whole = windowed = reach = states = 0.0
    for stage in plan.memory.kv.shape.stages:
        for spec in stage.specs.values():
            span = getattr(spec, "window", None) or getattr(spec, "chunk", None)
            if span:
                windowed += spec.bytes_of_token
                reach += spec.bytes_of_token * span
            else:
                whole += spec.bytes_of_token
                states += getattr(spec, "state_bytes", 0)
    return {
        "kv_bytes_per_token": whole,
        "window_bytes_per_token": windowed,
        "window": reach / windowed if windowed else 0.0,
        "state_bytes": states,
    }
