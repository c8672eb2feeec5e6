"""What vLLM's config classes refuse: bounds and choices of their fields, and settings that exclude each other. Bounds,
choices, names and interfaces are generated from vLLM's code (`facts.config_classes`); a release whose code was not
asked is not checked here."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from legroom.facts.config.fields import LENGTH_NAMES
from legroom.facts.config_classes import field_of_flag, interfaces, is_recorded, known_names, release_facts
from legroom.facts.flags import dest_name, flag_name
from legroom.facts.model import Attention, Dense, Experts, Model, StateSpace, with_kv_heads
from legroom.facts.releases import Release
from legroom.units import round_up
from legroom.vllm.args import EngineSettings, ServeArgs, draft_method, is_given, json_value, named_backend, other_value
from legroom.vllm.flag_values import FIELDS
from legroom.vllm.traits import VOCABULARY_PADDING, built_encoders, is_pooling, replicates_encoders, traits

Refusal = tuple[str, str]
"""vLLM's message, and what to do."""

_JSON_FLAGS = {
    "speculative_config": "SpeculativeConfig",
    "compilation_config": "CompilationConfig",
    "kv_transfer_config": "KVTransferConfig",
    "eplb_config": "EPLBConfig",
}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("greater than or equal to", lambda value, bound: value >= bound),
    "gt": ("greater than", lambda value, bound: value > bound),
    "le": ("less than or equal to", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
}


def config_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """What the release's config classes refuse, as (vLLM's message, hint) in their order; empty if not recorded."""
    if not is_recorded(release):
        return
    yield from field_refusals(settings.given, release)
    for rule in (
        _unknown_name_refusals,
        _input_refusals,
        _interface_refusals,
        _shard_refusals,
        _context_parallel_refusals,
        _expert_refusals,
        _lora_refusals,
        _scheduler_refusals,
        _speculation_refusals,
        _cache_refusals,
    ):
        yield from rule(settings, model, release)


def field_refusals(args: ServeArgs, release: Release) -> Iterator[Refusal]:
    """Refusals of numbers beyond their field's bounds, and of unknown keys and bad values in JSON flags."""
    if not is_recorded(release):
        return
    for dest, value in _given_numbers(args):
        yield from _out_of_bounds(dest, value, field_of_flag(dest, release), flag_name(dest))
    for dest, class_name in _JSON_FLAGS.items():
        fields = release_facts("config_fields", release).get(class_name, {})
        for key, item in (_json_value(args, dest) or {}).items():
            yield from _json_refusals(flag_name(dest), class_name, key, item, fields)


def _json_refusals(flag: str, class_name: str, key: str, item: Any, fields: Mapping[str, Any]) -> Iterator[Refusal]:
    """A refusal where the config class, with these `fields`, lacks a JSON flag's `key` or forbids its value `item`."""
    rule = fields.get(key)
    if rule is None:
        near = ", ".join(sorted(fields)[:6])
        yield f"{class_name}: {key}: Unexpected keyword argument", f"{flag} has no key {key}; it has {near} ..."
        return
    choices = rule.get("choices")
    if choices and item is not None and not _is_choice(item, choices):
        shown = ", ".join(repr(choice) for choice in choices if choice is not None)
        yield f"{class_name}: {key}: Input should be one of {shown}", f"give {flag} one of {shown} as {key}"
    elif isinstance(item, int | float) and not isinstance(item, bool):
        yield from _out_of_bounds(key, item, rule, f"{key} of {flag}")


def _is_choice(item: Any, choices: list[Any]) -> bool:
    """Whether the value is one of an enum's choices: by name, upper-cased, or as an int by its position in the list."""
    if item in choices or (isinstance(item, str) and item.upper() in choices):
        return True
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < len(choices)


def _out_of_bounds(name: str, value: float, rule: Mapping[str, Any], shown: str) -> Iterator[Refusal]:
    """A refusal for each bound (ge, gt, le, lt) in `rule` that the value violates; `shown`: the flag in the hint."""
    for key, (words, holds) in _BOUNDS.items():
        if key in rule and not holds(value, rule[key]):
            yield f"{name}: Input should be {words} {rule[key]}", f"give {shown} a value {words} {rule[key]}"


def _given_numbers(args: ServeArgs) -> Iterator[tuple[str, float]]:
    """(dest, value) of every given flag whose value is a number, except a max_model_len of -1 (fit to memory)."""
    for name in FIELDS:
        value = getattr(args, name)
        if isinstance(value, int | float) and not isinstance(value, bool) and (name, value) != ("max_model_len", -1):
            yield name, value
    for token in args.others:
        flag, has_value, text = token.partition("=")
        value = text if has_value else other_value(args, flag)
        if flag.startswith("--") and value is not None:
            try:
                yield dest_name(flag), float(value)
            except ValueError:
                continue


def _json_value(args: ServeArgs, dest: str) -> Mapping[str, Any] | None:
    """The JSON object given to the flag of this dest, from its ServeArgs field or from `others`; None if not given."""
    return getattr(args, dest) if dest in FIELDS else json_value(args, flag_name(dest))


def _unknown_name_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of attention backends and KV connectors that the release does not have."""
    backend, known = named_backend(settings.given, release), known_names("attention_backends", release)
    if backend and backend not in known:
        message = f"Unknown attention backend: '{backend}'. Valid options are: {', '.join(known)}"
        yield message, "leave --attention-backend out"
    transfer = _json_value(settings.given, "kv_transfer_config") or {}
    connector, connectors = transfer.get("kv_connector"), known_names("connectors", release)
    if connector and not transfer.get("kv_role"):
        roles = "'kv_producer', 'kv_consumer', or 'kv_both'"
        yield f"Please specify kv_role when kv_connector is set, supported roles are {roles}", "add kv_role: kv_both"
    elif connector and connector not in connectors and not transfer.get("kv_connector_module_path"):
        yield f"Unsupported connector type: {connector}", f"use one of {', '.join(connectors)}"


def _input_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of float16 for model types that vLLM does not run in it, and of negative --limit-mm-per-prompt."""
    model_type = str(model.config.get("model_type") or "")
    if settings.dtype == "float16" and model_type in known_names("without_float16", release):
        yield (
            f"The model type '{model_type}' does not support float16. Reason: Numerical instability. Please use "
            "bfloat16 or float32 instead.",
            "use --dtype bfloat16",
        )
    for kind, limit in (settings.given.limit_mm_per_prompt or {}).items():
        count = limit.get("count") if isinstance(limit, Mapping) else limit
        if model.modalities and isinstance(count, int) and count < 0:
            message = "limit_per_prompt.count: Input should be greater than or equal to 0"
            yield message, f"give --limit-mm-per-prompt 0 or more of {kind}"


def _interface_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of --convert, --runner, expert and pipeline parallelism that the model's class does not support."""
    implements = interfaces(model.architecture, release)
    if implements is not None:
        runner, convert = settings.given.runner, other_value(settings.given, "--convert")
        # In 0.20.2, not in 0.22.1: --convert alone leaves a generative model without a pooler.
        converted = runner is None and convert not in (None, "auto", "none")
        if converted and "pools" not in implements and release.before("0.21.0"):
            yield "AssertionError: pooler_config is not None", "add --runner pooling"
        if runner in ("generate", "draft") and "pools" in implements and "generates" not in implements:
            message = f"Embedding models do not support `--runner {runner}`. Use `--runner pooling` or `--runner auto`."
            yield message, "leave --runner out"
    if settings.enable_expert_parallel and not traits(model).moe:
        message = "Number of experts in the model must be greater than 0 when expert parallelism is enabled."
        yield message, "leave --enable-expert-parallel out: the model has no experts"
    if settings.pipeline_parallel_size > 1 and implements is not None and "pipeline_parallel" not in implements:
        yield (
            "Pipeline parallelism is not supported for this model. Supported models implement the `SupportsPP` "
            "interface.",
            "use --tensor-parallel-size instead of --pipeline-parallel-size",
        )


def _shard_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of tensor-parallel sizes that do not divide the model's widths."""
    ranks = settings.tensor_parallel_size
    expert_ranks = 1 if settings.enable_expert_parallel else settings.expert_ranks
    hint = "use another --tensor-parallel-size"
    padded = round_up(model.vocab_size, VOCABULARY_PADDING)
    if padded % ranks:
        yield f"{padded} is not divisible by {ranks}", hint
    for layer in model.distinct_layers:
        mixer, block = layer.mixer, layer.feedforward
        if isinstance(mixer, Attention) and max(mixer.kv_heads, ranks) % min(mixer.kv_heads, ranks):
            yield f"{mixer.kv_heads} KV heads and tensor parallel size {ranks} do not divide each other", hint
        if isinstance(mixer, StateSpace):
            widths = dict(mixer.config)
            if widths.get("n_groups", 1) > 1 and widths["n_groups"] % ranks:
                message = "If tensor parallel world size does not divide num_groups, then num_groups must equal 1."
                yield message, hint
            shared = (widths.get(name, 0) for name in ("intermediate_size", "num_heads", "num_k_heads", "num_v_heads"))
            yield from ((f"{width} is not divisible by {ranks}", hint) for width in shared if width % ranks)
        if isinstance(block, Dense) and block.intermediate_size % ranks:
            yield f"{block.intermediate_size} is not divisible by {ranks}", hint
        if isinstance(block, Experts) and block.intermediate_size % expert_ranks:
            yield f"{block.intermediate_size} is not divisible by {expert_ranks}", hint
    for encoder in built_encoders(settings.given, model, release):
        # Audio encoders are not split.
        split = encoder.exact and encoder.kind != "audio" and not replicates_encoders(settings.given, model)
        weights = [weight for weight in encoder.weights if weight.split]
        sizes = {weight.outputs if weight.split == "out" else weight.inputs for weight in weights}
        for size in sorted(sizes | {encoder.heads}):
            if split and size % ranks:
                yield f"{size} is not divisible by {ranks}", hint + ", or --mm-encoder-tp-mode data"


def _context_parallel_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of decode context parallelism by heads or windows, and of any context parallelism in hybrid models."""
    context, ranks, heads = settings.decode_context_parallel_size, settings.tensor_parallel_size, traits(model).heads
    attentions = with_kv_heads(layer.mixer for layer in model.distinct_layers)
    groups = traits(model).has_state and not traits(model).attention_free
    # In 0.20.2 to 0.25.1, not in 0.28.0.
    if groups and context * settings.prefill_context_parallel_size > 1 and release.before("0.26.0"):
        yield (
            "Hybrid KV cache groups with multiple block sizes do not support context parallelism "
            "(dcp_world_size/pcp_world_size > 1).",
            "leave context parallelism out",
        )
    if context <= 1:
        return
    if traits(model).compressed_mla:
        yield "DCP not support sliding window.", "leave --decode-context-parallel-size out"
    if traits(model).mla and settings.prefill_context_parallel_size > 1 and not traits(model).sparse_mla:
        yield "MLAAttention does not support PCP+DCP.", "leave --decode-context-parallel-size out"
    if traits(model).mla or not attentions or heads is None:
        return
    kv_heads = attentions[0].kv_heads
    if ranks <= kv_heads:
        yield (
            f"Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` ({ranks}) to be greater than "
            f"the model's total number of KV heads ({kv_heads}). Increase `--tensor-parallel-size` or set "
            "`--decode-context-parallel-size 1`.",
            "leave --decode-context-parallel-size out",
        )
    elif context > ranks // kv_heads:
        yield (
            f"`--decode-context-parallel-size` ({context}) exceeds the maximum supported value ({ranks // kv_heads}) "
            f"for `--tensor-parallel-size` ({ranks}) and {kv_heads} model KV heads.",
            f"use --decode-context-parallel-size {ranks // kv_heads} or less",
        )
    elif (heads // kv_heads) % context:
        yield (
            f"The model's number of query heads per KV head ({heads // kv_heads}) must be divisible by "
            f"`--decode-context-parallel-size` ({context}) for GQA/MQA.",
            "use a divisor of it",
        )
    elif any(attention.window for attention in attentions):
        yield "DCP not support sliding window.", "leave --decode-context-parallel-size out"


def _expert_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of expert load balancing (EPLB), dual batch overlap (DBO) and --enable-return-routed-experts."""
    given = settings.given
    redundant = (_json_value(given, "eplb_config") or {}).get("num_redundant_experts") or 0
    if is_given(given, "--enable-eplb"):
        if not settings.enable_expert_parallel:
            message = "enable_expert_parallel must be True to use EPLB."
            yield message, "add --enable-expert-parallel, or leave --enable-eplb out"
        elif settings.expert_ranks <= 1:
            sizes = f"TP={settings.tensor_parallel_size}, PCP={settings.prefill_context_parallel_size}"
            message = "EPLB requires tensor, prefill-context, or data parallelism, but got"
            yield f"{message} {sizes}, DP={settings.data_parallel_size}.", "leave --enable-eplb out on one GPU"
    elif redundant:
        yield (
            f"num_redundant_experts is set to {redundant} but EPLB is not enabled. Either enable EPLB or unset "
            "num_redundant_experts.",
            "add --enable-eplb, or leave num_redundant_experts out",
        )
    backend = other_value(given, "--all2all-backend") or "the default"
    if is_given(given, "--enable-dbo") and backend not in ("deepep_low_latency", "deepep_high_throughput", "nixl_ep"):
        yield (
            "Microbatching currently only supports the deepep_low_latency, deepep_high_throughput, and nixl_ep all2all "
            f"backends. {backend} is not supported.",
            "add --all2all-backend deepep_low_latency, or leave --enable-dbo out",
        )
    if release.before("0.32.0") or not is_given(given, "--enable-return-routed-experts"):
        return
    reasons = (
        (settings.runner != "V2", "requires Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=1."),
        (is_pooling(given, model), "only supports generate runners."),
        (not traits(model).moe, "only supports MoE models."),
        (not settings.enable_prefix_caching, "requires prefix caching."),
    )
    hint = "leave --enable-return-routed-experts out"
    yield from ((f"AuxOutput Connector {reason}", hint) for holds, reason in reasons if holds)


def _lora_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of LoRA: max_cpu_loras below max_loras, or an architecture without LoRA."""
    given = settings.given
    if not given.enable_lora:
        return
    on_cpu = other_value(given, "--max-cpu-loras")
    at_once = given.max_loras or 1
    if on_cpu is not None and on_cpu.isdecimal() and int(on_cpu) < at_once:
        yield f"max_cpu_loras ({on_cpu}) must be >= max_loras ({at_once}).", f"use --max-cpu-loras {at_once} or more"
    implements = interfaces(model.architecture, release)
    if implements is not None and "lora" not in implements:
        yield f"{model.architecture} does not support LoRA yet.", "leave --enable-lora out"


def _scheduler_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of partial prefills, too long a prefill threshold, and `auto` length without a config length."""
    threshold = other_value(settings.given, "--long-prefill-token-threshold")
    partial = (
        other_value(settings.given, name) for name in ("--max-num-partial-prefills", "--max-long-partial-prefills")
    )
    if settings.auto_fit_len and model.config and all(model.config.get(key) is None for key in LENGTH_NAMES):
        message = "max_model_len must be a positive integer, got int: -1. Example: max_model_len=2048"
        yield message, "give --max-model-len a length: the model's config has none to fit"
    if any(value and value.isdecimal() and int(value) > 1 for value in partial):
        message = "Concurrent Partial Prefill is not supported. We recommend to remove it from your config."
        yield message, "leave --max-num-partial-prefills and --max-long-partial-prefills out"
    too_long = threshold and threshold.isdecimal() and int(threshold) > settings.max_model_len
    if too_long and release.at_least("0.28.0"):
        yield (
            f"long_prefill_token_threshold ({threshold}) cannot be greater than the max_model_len "
            f"({settings.max_model_len}).",
            f"use --long-prefill-token-threshold {settings.max_model_len} or less",
        )


def _speculation_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of speculative decoding: no MTP layers, no token count, a draft of another vocabulary, no EAGLE-3."""
    spec = settings.given.speculative_config
    if not spec:
        return
    method = draft_method(spec)
    implements = interfaces(model.architecture, release)
    # Where the release counts the MTP layers, the checkpoint must hold some.
    own = {"mtp", f"mtp:{model.model_type}", *(["counted_mtp"] if model.draft_layers else [])}
    lacks_mtp = implements is not None and own.isdisjoint(implements)
    if lacks_mtp and method.endswith("mtp") and not spec.get("model"):
        hint = "leave --speculative-config out: the model has no MTP layers"
        yield f"Unsupported speculative method: '{method}'", hint
    elif spec.get("num_speculative_tokens") is None and method != "suffix":
        yield (
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains an "
            "n_predict parameter.",
            "add num_speculative_tokens to --speculative-config",
        )
    elif method == "draft_model" and model.draft is not None and model.draft.vocab_size != model.vocab_size:
        yield (
            f"Target and draft model should have the same vocabulary size. Target model vocab_size={model.vocab_size}. "
            f"Draft model vocab_size={model.draft.vocab_size}.",
            "use a draft of the same family",
        )
    elif method == "eagle3" and implements is not None and "eagle3" not in implements:
        yield "Model does not support EAGLE3 interface", "use another speculative method"


def _cache_refusals(settings: EngineSettings, model: Model, release: Release) -> Iterator[Refusal]:
    """Refusals of KV cache settings that the kind of attention does not support: dtypes, prefill context parallelism,
    one KV cache group for recurrent layers, and their prefix caching without chunked prefill."""
    dtype = settings.kv_cache_dtype
    if dtype.startswith("nvfp4") and traits(model).mla and not dtype.endswith("_ds_mla"):
        message = "nvfp4 KV cache is not supported with MLA (Multi-head Latent Attention) backends."
        yield message, "use --kv-cache-dtype fp8 or leave it out"
    method = model.quantization.method if model.quantization else ""
    if settings.kv_cache_dtype == "fp8_e5m2" and method.startswith(("fp8", "modelopt")):
        yield "fp8_e5m2 kv-cache is not supported with fp8 checkpoints.", "use --kv-cache-dtype fp8"
    named = named_backend(settings.given, release)
    if traits(model).compressed_mla and settings.kv_cache_dtype != "fp8_ds_mla" and "FLASHINFER" not in named:
        hint = "use --kv-cache-dtype fp8"
        yield f"DeepseekV4 fp8_ds_mla layout only supports fp8 kv-cache, got {settings.kv_cache_dtype}.", hint
    if traits(model).compressed_mla and settings.prefill_context_parallel_size > 1:
        message = "PCP requires attention backend support, but DEEPSEEK_SPARSE_SWA does not support PCP."
        yield message, "leave --prefill-context-parallel-size out"
    attentions = with_kv_heads(layer.mixer for layer in model.distinct_layers)
    packed = settings.kv_cache_dtype not in ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
    by_triton = "TRITON_ATTN_DIFFKV" in known_names("attention_backends", release)
    if packed and by_triton and any(attention.v_head_dim != attention.head_dim for attention in attentions):
        yield (
            "TritonAttentionDiffKVBackend supports only fp8/fp8_e4m3 quantized KV cache (got "
            f"kv_cache_dtype='{settings.kv_cache_dtype}').",
            "use --kv-cache-dtype fp8",
        )
    if settings.disable_hybrid_kv_cache_manager and traits(model).has_state and not traits(model).attention_free:
        yield (
            "Failed to promote local KV cache specs to one unified type.",
            "leave --disable-hybrid-kv-cache-manager out: attention and recurrent layers need groups of their own",
        )
    if traits(model).has_state and settings.enable_prefix_caching:
        mode = settings.given.mamba_cache_mode
        keeps_all = "mamba_prefix_caching" in (interfaces(model.architecture, release) or ()) and mode != "align"
        if not settings.enable_chunked_prefill and not (keeps_all and release.before("0.28.0")):
            message = "Chunked prefill is required for mamba cache mode 'align'."
            yield message, "leave chunked prefill on, or add --no-enable-prefix-caching"
        if is_given(settings.given, "--disable-chunked-mm-input"):
            yield (
                "Chunked MM input is required because we need the flexibility to schedule a multiple of block_size "
                "tokens even if they are in the middle of a mm input",
                "leave --disable-chunked-mm-input out, or add --no-enable-prefix-caching",
            )
