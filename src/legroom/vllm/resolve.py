"""From ServeArgs to the served model and to the EngineSettings that a release resolves for it on one GPU."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.config.fields import LENGTH_NAMES
from legroom.facts.config.model_config import derived_max_len
from legroom.facts.config_classes import known_names
from legroom.facts.flags import default
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.facts.model_sources import load
from legroom.facts.releases import Release
from legroom.vllm import args as vllm_args
from legroom.vllm.batching import batching_v0, batching_v1
from legroom.vllm.cudagraphs import captured_graphs, estimate_applied, num_speculative_tokens
from legroom.vllm.engine_selection import engine_of, runner_of
from legroom.vllm.precision import activation_dtype, kv_cache_dtype
from legroom.vllm.setting_checks import check_given, check_length, check_settings
from legroom.vllm.traits import is_pooling, traits


def served_model(args: vllm_args.ServeArgs) -> Model:
    """The model with --hf-overrides laid over its config, and the draft model of --speculative-config."""
    return with_draft(load(args.model, overrides=config_overrides(args)), args)


def with_draft(model: Model, args: vllm_args.ServeArgs, read: Callable[[str], Model] = load) -> Model:
    """The model with the draft that --speculative-config names, found by `read`; a head that cannot be read is left
    out, a draft model that cannot raises LegroomError."""
    name = vllm_args.draft_name(args.speculative_config)
    if not name:
        return model
    try:
        return replace(model, draft=read(name))
    except LegroomError as error:
        if vllm_args.draft_method(args.speculative_config) != "draft_model":
            return model
        message = f"the draft model of --speculative-config cannot be read: {error.message}"
        raise LegroomError(message, error.hint, error.exit_code) from error


def config_overrides(args: vllm_args.ServeArgs) -> Mapping[str, Any]:
    """Overrides of the model's config: --hf-overrides over --rope-scaling and --rope-theta; empty for none."""
    given: dict[str, Any] = {}
    for flag, key in (("--rope-scaling", "rope_scaling"), ("--rope-theta", "rope_theta")):
        text = vllm_args.other_value(args, flag)
        if text is not None:
            try:
                given[key] = json.loads(text)
            except (ValueError, RecursionError):
                continue
    return given | dict(args.hf_overrides or {})


_LONGROPE_KEY = "original_max_position_embeddings"


def max_model_len(args: vllm_args.ServeArgs, model: Model, release: Release) -> int:
    """The given max_model_len, else the one that the release derives from the config; RefusedByVllm if too long."""
    derived, limit = default_and_longest_len(args, model, release)
    window = model.config.get("sliding_window")
    if isinstance(window, int) and vllm_args.is_given(args, "--disable-sliding-window") and release.at_least("0.32.0"):
        derived, limit = min(derived, window), min(limit, window)
    if args.max_model_len is None or args.max_model_len == -1:
        return derived
    check_length(args, limit, model, release)
    return args.max_model_len


def default_and_longest_len(args: vllm_args.ServeArgs, model: Model, release: Release) -> tuple[int, int]:
    """(the default max_model_len, the longest one that the release accepts)."""
    given = config_overrides(args)
    if not model.config:
        # Without the config the overrides cannot be applied, so the given length is accepted.
        asked = args.max_model_len or 0
        return model.max_position_embeddings, max(model.max_position_embeddings, asked if given else 0)
    if model.modalities:  # top-level overrides do not reach a nested text config
        given = given.get("text_config") or {}
    config = {**model.config, **given}
    if all(config.get(key) is None for key in LENGTH_NAMES):
        # Every release accepts any length for a config without one (Mamba).
        return model.max_position_embeddings, max(model.max_position_embeddings, args.max_model_len or 0)
    if not given and not any(key in config for key in ("rope_scaling", "rope_parameters")):
        return model.max_position_embeddings, model.max_position_embeddings
    original = config.pop(_LONGROPE_KEY, None)
    # YaRN: up to 0.28.0 the length is original x factor, later max_position_embeddings.
    full = derived_max_len(config, yarn_multiplies=release.before("0.29.0"))
    # LongRoPE: from 0.11.1 on the default is the original length, and the limit the full one.
    sections = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    rope: Mapping[str, Any] = next((section for section in sections if isinstance(section, Mapping)), {})
    is_longrope = rope.get("rope_type", rope.get("type")) == "longrope"
    starts_short = isinstance(original, int) and is_longrope and release.at_least("0.11.1")
    return (int(original or full) if starts_short else full), full


_ASYNC_SPEC_METHODS = {"eagle", "eagle3", "mtp", "dflash", "dspark", "ngram_gpu", "draft_model"}


def resolve(args: vllm_args.ServeArgs, model: Model, gpu: Gpu, release: Release) -> vllm_args.EngineSettings:
    """The settings that vLLM resolves; LegroomError where the release refuses them."""
    check_given(args, release)
    engine, fallback_note = engine_of(args, model, gpu, release)
    dtype, dtype_note = activation_dtype(args, model, gpu, release)
    notes = [note for note in (release.note, fallback_note, dtype_note) if note]
    length = max_model_len(args, model, release)
    batching = (batching_v0 if engine == "V0" else batching_v1)(args, model, gpu, release, length)
    runner = runner_of(args, model, gpu, release)
    mode, sizes = captured_graphs(args, model, gpu, release, engine, batching)
    async_scheduling = engine == "V1" and _async_scheduling(args, model, release, runner)
    pipeline, utilization = args.pipeline_parallel_size or 1, args.gpu_memory_utilization
    if utilization is None:
        utilization = float(default("--gpu-memory-utilization", release))
    parallel_sizes: dict[str, Any] = {name: getattr(args, name) or 1 for name in vllm_args.PARALLEL_SIZES}
    settings = vllm_args.EngineSettings(
        release=release,
        engine=engine,
        runner=runner,
        usage=args.usage,
        dtype=dtype,
        quantization=args.quantization or (model.quantization.method if model.quantization else None),
        kv_cache_dtype=kv_cache_dtype(args, model, gpu, release),
        max_model_len=length,
        auto_fit_len=args.max_model_len == -1,
        **asdict(batching),
        gpu_memory_utilization=utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        block_size=args.block_size,
        **parallel_sizes,
        enable_expert_parallel=bool(args.enable_expert_parallel),
        enforce_eager=bool(args.enforce_eager),
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        graph_estimate_applied=estimate_applied(args, gpu, release, engine=engine, runner=runner, mode=mode),
        async_scheduling=async_scheduling,
        max_concurrent_batches=pipeline + 1 if async_scheduling and (runner == "V2" or pipeline == 1) else pipeline,
        disable_hybrid_kv_cache_manager=_hybrid_manager_off(args, model, release),
        num_speculative_tokens=num_speculative_tokens(args),
        given=args,
        notes=tuple(notes + _ignored_flag_notes(args, release, engine)),
    )
    check_settings(settings, model)
    # The checks take what is given; without a KV cache the engine then turns chunked prefill off.
    no_cache = traits(model).bidirectional and release.at_least("0.16.0")
    return replace(settings, enable_chunked_prefill=False) if no_cache else settings


def _async_scheduling(args: vllm_args.ServeArgs, model: Model, release: Release, runner: str) -> bool:
    """Whether scheduling is asynchronous: as given (0.10+), or by default since 0.14 if no setting rules it out."""
    if release.before("0.10.0"):
        return False
    if args.async_scheduling is not None:
        return args.async_scheduling
    if release.before("0.14.0"):
        return False
    spec = args.speculative_config or {}
    method = vllm_args.draft_method(spec)
    pipeline = (args.pipeline_parallel_size or 1) > 1
    against = (
        bool(spec) and method not in _ASYNC_SPEC_METHODS and not method.endswith("_mtp"),
        bool(spec.get("disable_padded_drafter_batch")),
        is_pooling(args, model) and release.at_least("0.18.0"),
        pipeline and release.before("0.15.0"),
        pipeline and runner == "V1" and release.at_least("0.29.0"),
        vllm_args.other_value(args, "--distributed-executor-backend") == "ray" and release.before("0.28.0"),
        traits(model).has_state and args.mamba_cache_mode in ("align", "all") and release.within("0.15.0", "0.17.1"),
    )
    return not any(against)


def _hybrid_manager_off(args: vllm_args.ServeArgs, model: Model, release: Release) -> bool:
    """Whether the hybrid KV cache manager is off: window and chunk layers then get as many blocks as full attention."""
    if release.before("0.9.1") or args.disable_hybrid_kv_cache_manager:
        return True
    chunked = traits(model).chunked
    allowed = vllm_args.env_flag(args, "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE")
    eagle = vllm_args.draft_method(args.speculative_config) in ("eagle", "eagle3", "mtp")
    against = (
        vllm_args.is_given(args, "--kv-transfer-config")
        and (release.before("0.22.0") or not _takes_hybrid_manager(args, release)),
        vllm_args.is_given(args, "--kv-events-config") and release.before("0.20.0"),
        chunked and eagle and release.at_least("0.10.0"),
        chunked and release.at_least("0.10.1") and not (release.at_least("0.14.0") if allowed is None else allowed),
    )
    return any(against)


def _takes_hybrid_manager(args: vllm_args.ServeArgs, release: Release) -> bool:
    """Whether the given KV connector works with the hybrid KV cache manager; True for an unknown one and for none."""
    known, able = (known_names(f"connectors{suffix}", release) for suffix in ("", "_with_hybrid_manager"))
    name = (vllm_args.json_value(args, "--kv-transfer-config") or {}).get("kv_connector")
    return name not in known or name in able


def _ignored_flag_notes(args: vllm_args.ServeArgs, release: Release, engine: str) -> list[str]:
    """Sentences about given flags that have no effect in this release and engine."""
    notes = []
    if engine == "V1" and args.swap_space is not None:
        notes.append("--swap-space does nothing here: the V1 engine never swaps: a preempted request is recomputed")
    if engine == "V1" and args.max_seq_len_to_capture is not None:
        notes.append("--max-seq-len-to-capture does nothing on the V1 engine")
    if args.enable_chunked_prefill is False and engine == "V1" and release.before("0.11.1"):
        notes.append(f"vLLM {release} keeps chunked prefill on for generative models whatever the flag says")
    if args.num_gpu_blocks_override is not None and release.version == "0.9.1":
        notes.append("vLLM 0.9.1 logs --num-gpu-blocks-override and does not apply it")
    return notes
