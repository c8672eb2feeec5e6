"""cudagraph_mode and cudagraph_capture_sizes of a release, and whether the budget counts graph memory. Attention
backends without full-graph support narrow the mode at load time; the default backends on NVIDIA GPUs (FlashAttention,
FlashInfer, FlashMLA) support it."""

from typing import Any

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs, env_flag, is_given, named_backend, other_values
from legroom.vllm.batching import Batching
from legroom.vllm.precision import activation_dtype, requested_cache_dtype
from legroom.vllm.traits import is_encoder_decoder, is_pooling, masks_images, traits

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_MODE_NUMBERS = {0: "NONE", 1: "PIECEWISE", 2: "FULL"}
_COMPILE_LEVELS = {"none": 0, "stock_torch_compile": 1, "dynamo_trace_once": 2, "vllm_compile": 3}


def captured_graphs(
    args: ServeArgs, model: Model, gpu: Gpu, release: Release, engine: str, batching: Batching
) -> tuple[str, tuple[int, ...]]:
    """(the cudagraph_mode, the ascending batch sizes that the release captures)."""
    if engine == "V0":
        if args.enforce_eager:
            return "NONE", ()
        largest = 8192 if release.at_least("0.6.0") else 256
        possible = [1, 2, 4, *range(8, largest + 1, 8)]
        stop = next((size for size in possible if size >= batching.max_num_seqs), possible[-1])
        return "FULL_DECODE_ONLY", tuple(size for size in possible if size <= stop)
    mode = _mode_v1(args, model, gpu, release)
    if mode == "NONE":
        return "NONE", ()
    model_limit = None
    if model.architecture == "GptOssForCausalLM" and release.at_least("0.10.1"):
        model_limit = 992 if release.version == "0.11.0" else 1024
    sizes = _sizes_v1(args, gpu, release, batching, model_limit)
    return (mode, sizes) if sizes else ("NONE", ())


def estimate_applied(args: ServeArgs, gpu: Gpu, release: Release, *, engine: str, runner: str, mode: str) -> bool:
    """Whether the release subtracts a CUDA graph estimate from the KV cache budget (0.18.0+, `mode` not NONE)."""
    if engine == "V0" or release.before("0.18.0") or mode == "NONE":
        return False
    asked = env_flag(args, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    if not (release.at_least("0.20.0") if asked is None else asked):
        return False
    if runner == "V2" and release.before("0.29.0"):
        return False  # the V2 runner's estimate is 0
    since = {"nvidia": "0.18.0", "amd": "0.26.0", "intel": "0.31.0"}.get(gpu.vendor)
    return since is not None and release.at_least(since)


def compilation_level(args: ServeArgs, release: Release) -> int:
    """The compilation level: 0 no torch.compile ... 3 vLLM's own backend, which piecewise graphs need."""
    config = args.compilation_config or {}
    asked = config.get("mode", config.get("level"))
    if isinstance(asked, str):
        text = asked.lower().removeprefix("compilationmode.")
        asked = int(text) if text.isdecimal() else _COMPILE_LEVELS.get(text)
    if isinstance(asked, int) and not isinstance(asked, bool):
        return asked
    return 0 if release.at_least("0.12.0") and args.optimization_level == 0 else 3


def _mode_v1(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> str:
    """The cudagraph_mode of the V1 engine after vLLM's adjustments for model, card and attention backend."""
    config = args.compilation_config or {}
    if args.enforce_eager or not _platform_captures(args, gpu, release) or config.get("use_cudagraph") is False:
        return "NONE"
    level = compilation_level(args, release)
    mode = _asked_mode(config.get("cudagraph_mode"))
    if mode is None:
        mode = _default_mode(args, model, release, level)
    if config.get("full_cuda_graph") and release.before("0.11.0"):
        mode = "FULL"
    if mode in ("PIECEWISE", "FULL_AND_PIECEWISE") and level != 3 and not config.get("splitting_ops"):
        # Without torch.compile there are no piecewise graphs; 0.29+ keeps full decode graphs.
        mode = "FULL_DECODE_ONLY" if release.at_least("0.29.0") and mode == "FULL_AND_PIECEWISE" else "NONE"
    if mode.startswith("FULL") and is_pooling(args, model) and release.at_least("0.11.0"):
        return "PIECEWISE"
    if is_encoder_decoder(model) and mode not in ("NONE", "FULL_DECODE_ONLY") and release.at_least("0.11.0"):
        return "FULL_DECODE_ONLY" if release.at_least("0.13.0") else "PIECEWISE"
    if mode == "FULL" and release.at_least("0.16.0") and not _captures_mixed_batches(args, model, gpu, release):
        mode = "FULL_AND_PIECEWISE" if level == 3 else "FULL_DECODE_ONLY"
    if mode.startswith("FULL") and _attention_in_no_graph(args, model, gpu, release):
        return "PIECEWISE" if level == 3 else "NONE"
    return mode


def _platform_captures(args: ServeArgs, gpu: Gpu, release: Release) -> bool:
    """Whether the platform captures graphs: always but on Intel, there from 0.22 by variable, from 0.31 by default."""
    if gpu.vendor != "intel":
        return True
    by_variable = release.at_least("0.22.0") and env_flag(args, "VLLM_XPU_ENABLE_XPU_GRAPH")
    return (release.at_least("0.31.0") or bool(by_variable)) and not is_given(args, "--enable-sleep-mode")


def _captures_mixed_batches(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> bool:
    """Whether the attention kernel's full graphs hold prefills too: FlashAttention 3, Triton, and MLA on Blackwell."""
    major = gpu.compute_capability[0]
    if traits(model).mla:
        return major == 10
    if requested_cache_dtype(args, model, gpu, release).startswith("nvfp4"):
        return False
    return major in (0, 7, 9) or (major in (8, 12) and masks_images(args, model, release))


def _attention_in_no_graph(args: ServeArgs, model: Model, gpu: Gpu, release: Release) -> bool:
    """Whether the attention backend has no full graphs: chunked attention, old Triton MLA, some FlashInfer, Gemma-3."""
    if traits(model).chunked:
        return release.at_least("0.11.0")
    major = gpu.compute_capability[0]
    if traits(model).mla and major not in (9, 10):
        return release.within("0.16.0", "0.20.2")
    if num_speculative_tokens(args) and major in (7, 8) and release.at_least("0.16.0"):
        named = named_backend(args, release)
        half = activation_dtype(args, model, gpu, release)[0] != "float32"
        by_default = major == 7 and half and release.before("0.24.0")
        by_default = by_default or requested_cache_dtype(args, model, gpu, release).startswith("fp8")
        if named == "FLASHINFER" or (not named and by_default and not traits(model).attention_free):
            return True
    composite = gpu.compute_capability[0] in (9, 10) and release.at_least("0.32.0")
    return composite and model.architecture == "Gemma3ForConditionalGeneration" and masks_images(args, model, release)


def _asked_mode(value: Any) -> str | None:
    """The cudagraph_mode's name from a flag's number or text; None where it is not given or no such mode exists."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _MODE_NUMBERS.get(value)
    text = str(value).upper().removeprefix("CUDAGRAPHMODE.") if value is not None else ""
    return text if text in MODES else None


def _default_mode(args: ServeArgs, model: Model, release: Release, level: int) -> str:
    """The release's default cudagraph_mode, before adjustments, at this compilation level (0 to 3)."""
    if release.at_least("0.12.0"):
        by_level = {0: "NONE", 1: "PIECEWISE"}
        return by_level.get(2 if args.optimization_level is None else args.optimization_level, "FULL_AND_PIECEWISE")
    if level != 3:
        return "NONE"
    if release.at_least("0.11.0") or (release.at_least("0.10.2") and traits(model).has_state):
        return "FULL_AND_PIECEWISE"
    return "PIECEWISE"


def _sizes_v1(
    args: ServeArgs, gpu: Gpu, release: Release, batching: Batching, model_limit: int | None
) -> tuple[int, ...]:
    """The batch sizes that V1 captures, ascending: those that the user gave, else the release's defaults.
    `model_limit`: the largest default size that the model's class sets, as gpt-oss does; None for other models."""
    max_num_batched_tokens = batching.max_num_batched_tokens
    config = (args.compilation_config or {}).get("cudagraph_capture_sizes")
    listed = config if isinstance(config, list | tuple) else ()
    whole = tuple(size for size in listed if isinstance(size, int) and not isinstance(size, bool))
    asked = args.cudagraph_capture_sizes or whole
    # --cuda-graph-sizes: one value is the largest size, several are the sizes themselves.
    values = other_values(args, "--cuda-graph-sizes") if release.within("0.9.0", "0.12.0") else None
    legacy = tuple(int(value) for value in values or () if value.isdigit() and int(value) > 0)
    if not asked and len(legacy) > 1:
        asked = legacy
    if asked:
        limit = max_num_batched_tokens if release.at_least("0.8.0") else max(asked)
        return tuple(sorted({size for size in asked if 1 <= size <= limit}))
    if release.at_least("0.11.1"):
        return _strided_sizes(args, gpu, release, batching, legacy[0] if legacy else model_limit)
    top = legacy[0] if legacy else min(2 * batching.max_num_seqs, 512) if release.at_least("0.10.0") else 512
    sizes: tuple[int, ...] = (1, 2, 4, *range(8, top + 1, 8))
    if model_limit and (not legacy or top < model_limit):
        sizes = (1, 2, 4, *range(8, 256, 8), *range(256, model_limit + 1, 16))
    limit = max_num_batched_tokens if release.at_least("0.8.0") else top
    return tuple(size for size in sizes if size <= limit)


def _strided_sizes(
    args: ServeArgs, gpu: Gpu, release: Release, batching: Batching, largest: int | None
) -> tuple[int, ...]:
    """Capture sizes from 0.11.1 on: in steps of 8 up to 256, of 16 beyond. `largest` is the last one where no flag sets
    it; where it is None too, max_num_seqs does, and sizes of full decode batches are added."""
    max_num_seqs, max_num_batched_tokens = batching.max_num_seqs, batching.max_num_batched_tokens
    ceiling = 1024 if release.at_least("0.28.0") and gpu.compute_capability[0] == 10 else 512
    query_len = 1 + num_speculative_tokens(args) if release.at_least("0.13.0") else 1
    config = args.compilation_config or {}
    largest = args.max_cudagraph_capture_size or config.get("max_cudagraph_capture_size") or largest
    top, decode = largest, set[int]()
    if not isinstance(top, int):
        top = min(max_num_seqs * query_len * 2, ceiling)
        decode = _decode_sizes(release, query_len, max_num_seqs, ceiling, top)
    top = min(top, max_num_batched_tokens)
    dense = args.performance_mode == "interactivity" and release.at_least("0.17.0")
    sizes = set(range(1, min(top, 32) + 1)) if dense else {size for size in (1, 2, 4) if size <= top}
    sizes |= set(range(8, min(top + 1, 256), 8)) | set(range(256, top + 1, 16))
    if release.at_least("0.20.1") and max_num_batched_tokens <= top:
        sizes.add(max_num_batched_tokens)
    sizes |= {size for size in decode if size <= max_num_batched_tokens}
    return tuple(sorted(sizes))


def _decode_sizes(release: Release, query_len: int, max_num_seqs: int, ceiling: int, top: int) -> set[int]:
    """Capture sizes (tokens, at most `top`) of decode batches with `query_len` tokens a request: several (0.29+) for up
    to min(max_num_seqs, `ceiling`) requests, one (0.31+) for max_num_seqs requests alone."""
    if query_len > 1 and release.at_least("0.29.0"):
        most = min(max_num_seqs, ceiling)
        counts = {n for n in (1, 2, 4) if n <= most} | set(range(8, min(most + 1, 256), 8))
        counts |= set(range(256, most + 1, 16)) | {most}
        return {n * query_len for n in counts if n * query_len <= top}
    return {max_num_seqs} if query_len == 1 and release.at_least("0.31.0") and max_num_seqs <= top else set()


def num_speculative_tokens(args: ServeArgs) -> int:
    """Draft tokens per step (num_speculative_tokens); 0 without speculative decoding."""
    value = (args.speculative_config or {}).get("num_speculative_tokens")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
