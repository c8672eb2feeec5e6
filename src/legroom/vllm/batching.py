"""Defaults of max_num_batched_tokens, max_num_seqs, chunked prefill and prefix caching."""

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.records import dataclass
from legroom.units import GIB
from legroom.vllm.args import ServeArgs, Usage, other_value
from legroom.vllm.traits import is_encoder_decoder, is_pooling, traits

CHUNKED_ABOVE_TOKENS = 32768
"""V0 chunks prefills by default above this max_model_len (`EngineArgs.create_engine_config`, 0.5.3 to 0.10)."""
_MIN_BATCHED_TOKENS = 2048  # The V0 engine's _DEFAULT_MAX_NUM_BATCHED_TOKENS.
_PREFIX_LM_TYPES = ("gemma4",)
"""Multimodal models with bidirectional attention among image tokens, whose largest item must fit a step (0.22+)."""
_BATCHED_ALL2ALL = {"deepep_low_latency", "pplx", "nixl_ep", "mori_low_latency"}


@dataclass(frozen=True, slots=True)
class Batching:
    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool


def batching_v1(args: ServeArgs, model: Model, gpu: Gpu, release: Release, max_model_len: int) -> Batching:
    """The V1 engine's max_num_batched_tokens, max_num_seqs, chunked prefill and prefix caching."""
    chunked = _chunked_prefill_v1(args, model, release)
    tokens, seqs = device_defaults(gpu, release, args.usage)
    if args.performance_mode == "throughput" and release.at_least("0.17.0"):
        tokens, seqs = 2 * tokens, 2 * seqs
    if args.max_num_seqs is not None:
        seqs = args.max_num_seqs
    # 0.9.2 - 0.10.0 replace even a given value without chunked prefill.
    if args.max_num_batched_tokens is None or (not chunked and release.within("0.9.2", "0.10.0")):
        tokens = _default_tokens_v1(args, model, release, tokens, seqs, max_model_len, chunked)
    else:
        tokens = args.max_num_batched_tokens
    if args.max_num_seqs is None and release.at_least("0.10.1"):
        seqs = min(seqs, tokens)
    return Batching(tokens, seqs, chunked, _prefix_caching_v1(args, model, release))


def _default_tokens_v1(
    args: ServeArgs, model: Model, release: Release, tokens: int, seqs: int, max_model_len: int, chunked: bool
) -> int:
    """V1's default max_num_batched_tokens; `tokens`: the card's, `seqs`: max_num_seqs, `chunked`: chunked prefill."""
    # Data-parallel ranks that share experts over an all-to-all backend with batched experts.
    shares_experts = (args.data_parallel_size or 1) > 1 and bool(args.enable_expert_parallel) and traits(model).moe
    is_batched = shares_experts and other_value(args, "--all2all-backend") in _BATCHED_ALL2ALL
    if release.at_least("0.20.0") and is_batched:
        tokens = 256 * (2 if args.performance_mode == "throughput" else 1)
    if not chunked:
        if release.at_least("0.11.1"):
            tokens = max(max_model_len, tokens)
        elif release.at_least("0.9.2"):
            tokens = max_model_len
    if release.at_least("0.22.0") and model.model_type.startswith(_PREFIX_LM_TYPES) and not args.language_model_only:
        tokens = max(tokens, *(item.max_tokens_per_item for item in model.modalities), 0)
    if release.at_least("0.11.1"):
        tokens = min(seqs * max_model_len, tokens)
    return tokens


def device_defaults(gpu: Gpu, release: Release, usage: Usage) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs): the V1 engine's defaults on this card."""
    offline = usage == "llm"
    name = gpu.name.lower()
    if release.before("0.7.0"):
        return (8192 if offline else 2048), 256
    if gpu.unified and (gpu.vendor == "nvidia" or release.at_least("0.24.0")):
        # NVML reports no total there, and amdsmi only what the firmware set aside: defaults of a small card.
        large = False
    elif release.before("0.8.5"):
        large = "h100" in name or "h200" in name
    else:
        large = gpu.total_bytes >= 70 * GIB and (release.before("0.9.0") or "a100" not in name)
    huge = release.at_least("0.28.0") and gpu.total_bytes >= 160 * GIB and not gpu.unified
    tokens = 16384 if huge or (large and offline) else 8192 if large or offline else 2048
    many = release.at_least("0.8.0") and (large or huge or release.before("0.8.4"))
    return tokens, 1024 if many else 256


def _chunked_prefill_v1(args: ServeArgs, model: Model, release: Release) -> bool:
    """Whether V1 chunks prefills: as given (before 0.11.1 only for pooling models), else where the model allows it."""
    supported = not is_encoder_decoder(model)
    if is_pooling(args, model):
        supported = supported and not traits(model).bidirectional
    elif release.before("0.11.1"):
        # Generative models could not turn it off before 0.11.1.
        return supported
    return supported if args.enable_chunked_prefill is None else args.enable_chunked_prefill


def _prefix_caching_v1(args: ServeArgs, model: Model, release: Release) -> bool:
    """Whether V1 caches prefixes: as given, else by the model's default; False where the release cannot."""
    if is_pooling(args, model):
        supported = release.at_least("0.9.2") and not traits(model).bidirectional and not is_encoder_decoder(model)
    elif is_encoder_decoder(model) or traits(model).attention_free:
        supported = False
    else:
        # Hybrid models: not supported up to 0.11.0, off by default up to 0.27.1, on since.
        supported = not traits(model).hybrid or release.at_least("0.28.0")
    if (traits(model).hybrid or traits(model).attention_free) and release.before("0.11.1"):
        return False
    if is_encoder_decoder(model) and release.before("0.16.0"):  # later releases say so and keep what is given
        return False
    return supported if args.enable_prefix_caching is None else args.enable_prefix_caching


def batching_v0(args: ServeArgs, model: Model, gpu: Gpu, release: Release, max_model_len: int) -> Batching:
    """The V0 engine's max_num_batched_tokens, max_num_seqs, chunked prefill and prefix caching."""
    chunked = _chunked_prefill_v0(args, model, gpu, release, max_model_len)
    seqs = args.max_num_seqs if args.max_num_seqs is not None else 256
    tokens = args.max_num_batched_tokens
    if tokens is None:
        tokens = max(max_model_len, _MIN_BATCHED_TOKENS)
        steps = other_value(args, "--num-scheduler-steps") or "1"
        multi_step = steps.isdigit() and int(steps) > 1 and release.at_least("0.6.3")
        if chunked and not multi_step:
            tokens = _MIN_BATCHED_TOKENS if release.at_least("0.6.5") else 768 if release.version == "0.4.1" else 512
        pooling = is_pooling(args, model)
        if pooling and release.at_least("0.4.3") and (release.at_least("0.6.0") or not chunked):
            tokens = max(tokens, 32768)
        if model.modalities and release.at_least("0.6.0"):
            tokens = max(tokens, 4096 if release.before("0.6.3") else 5120)
        if release.at_least("0.9.0"):
            tokens = min(tokens, seqs * max_model_len)
    return Batching(tokens, seqs, chunked, bool(args.enable_prefix_caching))


def _chunked_prefill_v0(args: ServeArgs, model: Model, gpu: Gpu, release: Release, max_model_len: int) -> bool:
    """Whether V0 chunks prefills: as given, else with max_model_len above 32,768 on NVIDIA if no feature forbids it."""
    if args.enable_chunked_prefill is not None:
        return args.enable_chunked_prefill
    if release.before("0.5.3") or max_model_len <= CHUNKED_ABOVE_TOKENS or gpu.vendor != "nvidia":
        return False
    exceptions = (
        traits(model).slides_everywhere and other_value(args, "--disable-sliding-window") is None,
        bool(args.speculative_config) or other_value(args, "--speculative-model") is not None,
        bool(args.enable_lora),
        other_value(args, "--enable-prompt-adapter") is not None,
        release.before("0.7.0") and bool(args.enable_prefix_caching),
        release.before("0.7.0") and (traits(model).hybrid or traits(model).attention_free),
        release.at_least("0.6.4") and bool(model.modalities),
        release.at_least("0.8.0") and traits(model).mla,
        release.at_least("0.6.5") and is_pooling(args, model),
    )
    return not any(exceptions)
