"""Cards, dtypes, quantizations and architectures that a release does not run, with vLLM's error messages. A
quantization is checked in vLLM's order: `ModelConfig._verify_quantization`, then the method's config, the card, the
dtype."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from legroom.facts import release_support as support
from legroom.facts.config_classes import accepted_quantizations, backend_table, interfaces, is_recorded, known_names
from legroom.facts.gpus import Gpu, dotted
from legroom.facts.model import Dense, Experts, Model, Quantization
from legroom.facts.releases import Release, first_release, latest
from legroom.records import dataclass
from legroom.vllm.args import EngineSettings, is_given
from legroom.vllm.attention_selection import backend_refusals
from legroom.vllm.traits import built_encoders, replicates_encoders, traits

_UNKNOWN = (0, 0)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The reason why a release does not run a model, card or setting."""

    id: str
    """unsupported_gpu | unsupported_dtype | unsupported_quantization | unsupported_kv_cache_dtype |
    unsupported_architecture | unsupported_attention_backend"""
    message: str
    """The error message of vLLM or CUDA."""
    hint: str
    """What the user can do, as a clause."""
    certain: bool = True
    """False: another build, a plugin, or the checkpoint's real config may run."""


def unsupported(settings: EngineSettings, model: Model, gpu: Gpu) -> Unsupported | None:
    """The first reason, a certain one before uncertain ones, why the release does not run these settings; else None."""
    found = [reason for check in _CHECKS for reason in check(settings, model, gpu, settings.release)]
    return next((reason for reason in found if reason.certain), found[0] if found else None)


def _card_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where the published builds have no kernels for the card; uncertain where the card is newer than they."""
    if gpu.vendor != "nvidia" or gpu.compute_capability == _UNKNOWN:
        return
    oldest, newest = support.supported_capabilities(release)
    message = "CUDA error: no kernel image is available for execution on the device"
    own = dotted(gpu.compute_capability)
    if gpu.compute_capability < oldest:
        hint = f"vLLM {release} is built for compute capability {dotted(oldest)} and up, {gpu.name} has {own}"
        yield Unsupported("unsupported_gpu", message, hint)
    elif gpu.compute_capability[0] > newest[0]:
        # The card's vendor may publish builds before vLLM's wheels support it.
        hint = (
            f"the published builds of vLLM {release} end at compute capability {dotted(newest)}; {gpu.name} has "
            f"{own}: use vLLM 0.9.0 or later, or a build of your own"
        )
        yield Unsupported("unsupported_gpu", message, hint, certain=False)


def _dtype_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where bfloat16 is used on NVIDIA cards before Ampere."""
    if settings.dtype != "bfloat16" or not _is_below(gpu, (8, 0)):
        return
    yield Unsupported(
        "unsupported_dtype",
        "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
        f"Your {gpu.name} GPU has compute capability {dotted(gpu.compute_capability)}. You can use float16 instead "
        "by explicitly setting the `dtype` flag in CLI, for example: --dtype=half.",
        "add --dtype half",
    )


def _kv_dtype_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where the KV cache is FP8 on a card whose attention kernels cannot read it."""
    if not settings.kv_cache_dtype.startswith("fp8") or not _is_below(gpu, (8, 9)):
        return
    if settings.engine == "V0" or release.before("0.11.0") or traits(model).mla:
        return
    if release.at_least("0.24.0") and backend_table(release, gpu.compute_capability) is not None:
        return  # `_attention_reasons` knows
    capability = dotted(gpu.compute_capability)
    flashinfer_from = (8, 0) if release.at_least("0.24.0") else (7, 5)
    if release.at_least("0.11.1") and gpu.compute_capability >= flashinfer_from:
        return
    suggested = "float16" if _is_below(gpu, (8, 0)) else "bfloat16"
    message = "type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')"
    if release.at_least("0.24.0"):
        message = (
            f"FP8 KV cache is not supported by the Triton attention backend on {gpu.name} (compute capability "
            f"{capability}); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype {suggested}."
        )
    elif release.before("0.11.1") and _is_below(gpu, (8, 0)):
        message = "FlexAttention does not support quantized kv-cache. Yet"
    yield Unsupported("unsupported_kv_cache_dtype", message, "leave --kv-cache-dtype out: the cache follows the model")


def _architecture_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where the release does not have the model's architecture; uncertain if Transformers' code may run it."""
    if traits(model).hybrid and interfaces(model.architecture, release) is None and is_recorded(release):
        message = f"Model architectures ['{model.architecture}'] are not supported for now."
        yield Unsupported("unsupported_architecture", message, f"vLLM {release} has no {model.architecture}")
    if release.version == latest().version:
        return
    since = first_release(model.architecture)
    if since is None or not release.before(since):
        return
    # The Transformers backend (0.7.1+) runs dense text models, and others from 0.11.1 on.
    dense_text = not (traits(model).moe or traits(model).hybrid or traits(model).mla or model.modalities)
    yield Unsupported(
        "unsupported_architecture",
        f"Model architectures ['{model.architecture}'] are not supported for now.",
        f"vLLM has {model.architecture} since {since}: use that release or a later one",
        certain=release.before("0.7.1") or (not dense_text and release.before("0.11.1")),
    )


def _is_below(gpu: Gpu, needed: tuple[int, int]) -> bool:
    """Whether an NVIDIA card is known to be below the compute capability `needed`."""
    return gpu.vendor == "nvidia" and _UNKNOWN < gpu.compute_capability < needed


def _capability_as_int(capability: tuple[int, int]) -> int:
    """Compute capability (7, 5) as 75, as vLLM writes it."""
    return 10 * capability[0] + capability[1]


_ID = "unsupported_quantization"
_RUNS_ALSO = {
    "gptq": {"gptq", "auto_gptq", "moe_wna16", "gptq_bitblas", "exllama", "humming", "inc", "auto-round"},
    "awq": {"awq", "auto_awq", "moe_wna16", "humming", "inc", "auto-round"},
    "modelopt": {"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "petit_nvfp4", "nvfp4"},
    "mxfp4": {"mxfp4", "gpt_oss_mxfp4", "humming"},
    "fp8": {"fp8", "deepseek_v4_fp8", "humming"},
    "compressed-tensors": {"compressed-tensors", "humming"},
}
"""Values of --quantization that run a checkpoint's method: each release's `override_quantization_method`."""
_RENAMED = {"auto-round": "inc"}
"""Methods of checkpoints that later releases run under another name (`INCConfig.override_quantization_method`)."""
_MARLIN_NAMES = {"gptq": ("gptq_marlin", "marlin"), "awq": ("awq_marlin", "marlin")}
_REQUANTIZING = ("fp8_per_", "int8_per_", "nvfp4_per_")
_ONLINE_SHORTHANDS = ("online", *_REQUANTIZING)
_ONLINE_ANY_DTYPE = {"mxfp4"}  # Methods whose online form takes dtypes that their checkpoints do not.
_MX_GROUP = 32
_SMALLEST_BLOCK = 32  # The rows of the smallest block into which 0.32 cuts the scales of experts.
_CONFIG_CLASSES = {
    "compressed-tensors": "CompressedTensorsConfig",
    "quark": "QuarkConfig",
    "torchao": "TorchAOConfig",
    "fbgemm_fp8": "FBGEMMFp8Config",
    "fp_quant": "FPQuantConfig",
}

_EXPERT_METHODS = {
    "awq": ("AutoAWQMoEMethod", "AWQMarlinMoEMethod"),
    "gptq": ("AutoGPTQMoEMethod", "GPTQMarlinMoEMethod"),
    "compressed-tensors int8": ("CompressedTensorsW8A8Int8MoEMethod",),
    "humming": ("HummingMoEMethod",),
    "modelopt": ("ModelOptFp8MoEMethod",),
    "moe_wna16": ("MoeWNA16Method",),
    "mxfp4 gpt_oss": ("GptOssMxfp4MoEMethod", "Mxfp4MoEMethod"),
}
"""The classes that run the experts of a method, under their names in several releases."""


def _method_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """Reasons against the method of --quantization or of the config; uncertain where the method was guessed."""
    guessed = model.quantization is not None and not _is_own_config(model)
    for reason in _quantization_reasons(settings, model, gpu, release):
        yield replace(reason, certain=False) if guessed else reason


def _quantization_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """Why the quantization is refused: unknown, deprecated, or not for this checkpoint, card or dtype."""
    if not (settings.quantization or settings.given.quantization):
        return
    declared = _declared_method(model)
    flag = _flag_in_force((settings.given.quantization or "").lower(), declared, model, release)
    method = _method_in_use(flag, model, gpu, release)
    if support.quantization_method(method, release) is None:
        yield _unknown_method(method, release)
        return
    if flag is not None and declared is not None and not _is_compatible(flag, declared, model, gpu, release):
        message = (
            f"Quantization method specified in the model config ({declared}) does not match the quantization method "
            f"specified in the `quantization` argument ({flag})."
        )
        yield Unsupported(_ID, message, "leave --quantization out: the checkpoint says what it is")
        return
    requantizes = (settings.given.quantization or "").startswith((*_REQUANTIZING, "mxfp8"))
    if requantizes and declared and is_recorded(release) and release.before("0.21.0"):  # in 0.20.2, not in 0.22.1
        message = (
            "Setting `quantization_config` for online quantization when the model checkpoint already has a "
            "`quantization_config` is not supported"
        )
        yield Unsupported(_ID, message, "leave --quantization out: the checkpoint says what it is")
    if support.is_deprecated(method, release) and not is_given(settings.given, "--allow-deprecated-quantization"):
        yield Unsupported(
            _ID,
            f"The quantization method {method} is deprecated and will be removed in future versions of vLLM. To "
            "bypass, set `--allow-deprecated-quantization`.",
            "add --allow-deprecated-quantization, or use another checkpoint",
        )
    yield from _on_unquantized(method, declared, model, release)
    if method == "online" and declared is None and not is_given(settings.given, "--quantization-config"):
        message = "OnlineQuantizationConfig.__init__() missing 1 required positional argument: 'args'"
        yield Unsupported(_ID, message, "add --quantization-config, or use --quantization fp8_per_tensor")
    if declared == "gptq" and model.quantization and model.quantization.act_order and release.at_least("0.32.0"):
        yield Unsupported(
            _ID,
            "GPTQ group activation ordering (desc_act=True) is no longer supported. Use a checkpoint with static "
            "activation ordering or desc_act=False.",
            "use a checkpoint with desc_act=False",
        )
    yield from _method_on_card(method, model, gpu, release)
    yield from _method_in_dtype(method, settings.dtype, release, online=model.quantization is None)
    if declared and traits(model).moe and (settings.given.quantization or "").startswith(_REQUANTIZING):
        message = "Requantizing checkpoint-quantized MoE layers is not supported."
        yield Unsupported(_ID, message, "leave --quantization out: the checkpoint says what it is")
    yield from _mx_group_reasons(method, settings, model, release)
    yield from _dense_groups(settings, model, release)
    yield from _expert_blocks(settings, model, gpu, release)
    yield from _eplb_reasons(method, settings, model, release)


def _flag_in_force(flag: str, declared: str | None, model: Model, release: Release) -> str | None:
    """The method of --quantization (`flag`); None if empty or if the checkpoint's (`declared`) overrides it."""
    accepted = accepted_quantizations(_checkpoint_kind(declared, model), release) if declared else None
    takes_any = (
        accepted is not None and "no_such_method" in accepted and support.quantization_method(flag, release) is None
    )
    return None if accepted == () or declared in _RENAMED or takes_any else flag or None


def _unknown_method(method: str, release: Release) -> Unsupported:
    """The refusal of a quantization method that the release does not have; its hint names a plugin that brings it."""
    package = support.plugin_of(method, release)
    message = f"Unknown quantization method: {method}. Must be one of {list(support.quantization_methods(release))}."
    if package:
        return Unsupported(_ID, message, f"install {package}, which brings {method} to vLLM {release}")
    return Unsupported(_ID, message, f"vLLM {release} has no quantization method {method}")


def _on_unquantized(method: str, declared: str | None, model: Model, release: Release) -> Iterator[Unsupported]:
    """A reason where the method runs quantized checkpoints only and this one has no quant_method (`declared` None)."""
    known = support.quantization_method(method, release)
    if declared is not None or model.quantization is not None or known is None or known.of_plain == "online":
        return
    message = f"Cannot find the config file for {method}"
    if known.of_plain == "arguments":
        name = _CONFIG_CLASSES.get(method, f"the config of {method}")
        message = f"{name}.__init__() missing required positional arguments"
    hint = f"{method} takes a checkpoint that was quantized before: use one, or --quantization fp8"
    yield Unsupported(_ID, message, hint, certain=model.source != "the given config.json" or _is_own_config(model))


def _method_on_card(method: str, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where the card is below the method's least compute capability, or on AMD is not supported."""
    if gpu.vendor == "amd":
        supported = support.amd_methods(release)
        if supported is not None and method not in supported:
            message = f"{method} quantization is currently not supported in rocm."
            yield Unsupported(_ID, message, "use a checkpoint in a format that this release runs on AMD cards")
        return
    capability = _capability_as_int(gpu.compute_capability)
    if gpu.vendor != "nvidia" or not capability:
        return
    known = support.quantization_method(method, release)
    needed = known.min_capability if known else 0
    if capability < needed:
        message = (
            f"The quantization method {method} is not supported for the current GPU. Minimum capability: {needed}. "
            f"Current capability: {capability}."
        )
        yield Unsupported(_ID, message, f"use a checkpoint in a format that runs on {gpu.name}")
    elif method == "compressed-tensors" and model.quantization is not None:
        yield from _scheme_on_card(model.quantization, gpu, capability, release)


def _scheme_on_card(scheme: Quantization, gpu: Gpu, capability: int, release: Release) -> Iterator[Unsupported]:
    """A reason where the release lacks the compressed-tensors scheme, or the card's `capability` (as 75) is too low."""
    needed = support.scheme_capability(_scheme_name(scheme), release)
    if needed is None:
        message = "No compressed-tensors compatible scheme was found."
        yield Unsupported(_ID, message, f"vLLM {release} does not read this format yet")
    elif capability < needed:
        message = (
            f"Quantization scheme is not supported for the current GPU. Min capability: {needed}. Current capability: "
            f"{capability}."
        )
        yield Unsupported(_ID, message, f"use a checkpoint in a format that runs on {gpu.name}")


def _scheme_name(scheme: Quantization) -> str:
    """The compressed-tensors scheme by which the release's needed compute capability is looked up."""
    if scheme.number == "float":
        if scheme.weight_bits == 4:
            return "mxfp4" if scheme.group_size == 32 else "nvfp4"
        return "fp8"
    activations = scheme.dynamic_activations or scheme.static_activations
    return "int8" if activations and scheme.weight_bits == 8 else "int_16bit_activations"


def _method_in_dtype(method: str, dtype: str, release: Release, *, online: bool) -> Iterator[Unsupported]:
    """A reason where the method does not run in this dtype; `online`: it quantizes an unquantized checkpoint."""
    known = support.quantization_method(method, release)
    if known is None or not known.dtypes or dtype in known.dtypes or (online and method in _ONLINE_ANY_DTYPE):
        return
    names = ", ".join(f"torch.{name}" for name in known.dtypes)
    yield Unsupported(
        _ID,
        f"torch.{dtype} is not supported for quantization method {method}. Supported dtypes: [{names}]",
        f"add --dtype {'half' if known.dtypes[-1] == 'float16' else known.dtypes[-1]}",
    )


def _expert_blocks(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where a rank's slice of an expert does not consist of whole scale blocks (0.32+: of 32 rows)."""
    scheme = model.quantization
    if scheme is None or scheme.block is None or scheme.weight_bits != 8 or settings.enable_expert_parallel:
        return
    rows = scheme.block[0]
    for experts in {layer.feedforward for layer in model.distinct_layers if isinstance(layer.feedforward, Experts)}:
        shard = experts.intermediate_size // settings.expert_ranks
        if shard % rows == 0:
            continue
        if release.at_least("0.32.0") and shard % _SMALLEST_BLOCK == 0:
            if _is_below(gpu, (8, 9)):
                message = "No FP8 MoE backend supports the deployment configuration."
                yield Unsupported(_ID, message, "add --enable-expert-parallel, or use a smaller --tensor-parallel-size")
            continue
        message = (
            f"The output_size of gate's and up's weight = {shard} is not divisible by weight quantization block_n = "
            f"{rows}."
        )
        yield Unsupported(_ID, message, "add --enable-expert-parallel, or use a smaller --tensor-parallel-size")


def _dense_groups(settings: EngineSettings, model: Model, release: Release) -> Iterator[Unsupported]:
    """A reason where a rank's slice of an MLP does not consist of whole scale blocks or quantization groups."""
    scheme = model.quantization
    if scheme is None or not is_recorded(release):
        return
    step = scheme.block[1] if scheme.block else scheme.group_size if scheme.number == "int" else None
    for block in {layer.feedforward for layer in model.distinct_layers if isinstance(layer.feedforward, Dense)}:
        shard = block.intermediate_size // settings.tensor_parallel_size
        if step and settings.tensor_parallel_size > 1 and shard % step:
            name = f"weight quantization block_n = {step}" if scheme.block else f"group_size = {step}"
            message = f"Weight input_size_per_partition = {shard} is not divisible by {name}."
            stages = settings.tensor_parallel_size * settings.pipeline_parallel_size
            hint = f"a GPU's {shard:,} rows of the MLP are not whole groups of {step}: split by layers in place of "
            hint += f"tensors (--pipeline-parallel-size {stages}), or take a checkpoint padded to whole groups"
            yield Unsupported(_ID, message, hint)


def _eplb_reasons(method: str, settings: EngineSettings, model: Model, release: Release) -> Iterator[Unsupported]:
    """A reason where expert load balancing (EPLB) meets a method whose experts cannot be moved between ranks."""
    if not (is_given(settings.given, "--enable-eplb") and traits(model).moe):
        return
    scheme = model.quantization
    if method == "compressed-tensors":
        method = f"{method} {_scheme_name(scheme)}" if scheme else method
    elif method == "mxfp4":
        method = f"{method} {model.model_type}"
    without = known_names("expert_methods_without_eplb", release)
    for name in _EXPERT_METHODS.get(method.removesuffix("_marlin"), ()):
        if name in without:
            message = f"EPLB is not supported {name}."
            yield Unsupported(_ID, message, "leave --enable-eplb out, or use an FP8 or unquantized checkpoint")


def _mx_group_reasons(method: str, settings: EngineSettings, model: Model, release: Release) -> Iterator[Unsupported]:
    """A reason where online MXFP4 or MXFP8 would quantize encoder weights whose inputs per rank no 32 divides."""
    if method not in ("mxfp4", "mxfp8") or model.quantization is not None:
        return
    ranks = 1 if replicates_encoders(settings.given, model) else settings.tensor_parallel_size
    for encoder in built_encoders(settings.given, model, release):
        for weight in encoder.weights:
            inputs = weight.inputs // ranks if weight.split == "in" else weight.inputs
            if inputs % _MX_GROUP and weight.split:
                name = method.upper()
                message = f"{name} requires input_size_per_partition ({inputs}) to be divisible by {_MX_GROUP}."
                yield Unsupported(_ID, message, "use --quantization fp8")
                return


def _declared_method(model: Model) -> str | None:
    """quant_method of the checkpoint's config in lower case, else the method read from it; None if unquantized."""
    if model.quantization is None:
        return None
    for holder in (model.config, model.config.get("text_config")):
        section = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if isinstance(section, Mapping) and section.get("quant_method"):
            return str(section["quant_method"]).lower().replace("compressed_tensors", "compressed-tensors")
    return model.quantization.method


def _method_in_use(flag: str | None, model: Model, gpu: Gpu, release: Release) -> str:
    """The method that the release runs: the flag's, else the checkpoint's, or its Marlin form; empty if unquantized."""
    scheme = model.quantization
    declared = _declared_method(model)
    if scheme is None or declared is None:
        return flag or ""
    if flag is not None and (flag != "marlin" or not _is_compatible(flag, declared, model, gpu, release)):
        return flag
    own = scheme.method if scheme.method.startswith("modelopt") else declared
    marlin = next(iter(_MARLIN_NAMES.get(own, ())), "")
    if marlin and _marlin_runs(marlin, scheme, gpu, release):
        return marlin
    if own == "modelopt_fp4" and release.before("0.9.0"):
        return "nvfp4"
    return own if support.quantization_method(own, release) else _RENAMED.get(own, own)


def _checkpoint_kind(declared: str, model: Model) -> str:
    """The kind of checkpoint that `accepted_quantizations` takes, for one whose config states the method `declared`."""
    model_type = model.config.get("model_type")
    if declared == "fp8" and model_type == "deepseek_v4":
        return "deepseek_v4"
    if declared.startswith("modelopt"):
        own = model.quantization.method if model.quantization else declared
        return {"modelopt_fp4": "modelopt_nvfp4", "modelopt": "modelopt_fp8"}.get(own, "modelopt_mixed")
    return declared if declared != "mxfp4" or model_type == "gpt_oss" else "mxfp4 of another model"


def _is_compatible(flag: str, declared: str, model: Model, gpu: Gpu, release: Release) -> bool:
    """Whether vLLM takes --quantization `flag` for a checkpoint whose config states the method `declared`."""
    accepted = accepted_quantizations(_checkpoint_kind(declared, model), release)
    if accepted is not None:
        return not accepted or flag in accepted
    if flag == declared or flag.startswith(_ONLINE_SHORTHANDS) or flag == "humming":
        return True
    scheme = model.quantization
    family = "modelopt" if declared.startswith("modelopt") else scheme.method if scheme else declared
    if flag in _MARLIN_NAMES.get(family, ()):
        return scheme is not None and _marlin_runs(_MARLIN_NAMES[family][0], scheme, gpu, release)
    return flag in _RUNS_ALSO.get(family, {declared})


def _marlin_runs(marlin: str, scheme: Quantization, gpu: Gpu, release: Release) -> bool:
    """Whether the release has the method `marlin`, such as awq_marlin, and its kernel runs the scheme on the card."""
    known = support.quantization_method(marlin, release)
    if known is None or gpu.vendor != "nvidia":
        # 0.14+ accepts the name on AMD cards and runs other kernels.
        return known is not None and release.at_least("0.14.0")
    capability = _capability_as_int(gpu.compute_capability)
    needed = known.min_capability if release.before("0.22.0") else 75
    return scheme.weight_bits in (4, 8) and (not capability or capability >= needed)


def _is_own_config(model: Model) -> bool:
    """Whether the config is surely the checkpoint's own: bundled, or one with a transformers_version."""
    return not model.assumed and (model.source.startswith("bundled") or "transformers_version" in model.config)


def _attention_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """A reason where vLLM finds no attention backend for the model on this card, or rejects the named one; an uncertain
    one where no sparse MLA kernel that DeepSeek-V4 needs is built for the card."""
    for message, hint in backend_refusals(settings, model, gpu, release):
        yield Unsupported("unsupported_attention_backend", message, hint)
    table = backend_table(release, gpu.compute_capability) if traits(model).compressed_mla else None
    if table is not None and not any(table.supports(name, "runs") for name in table.names if name.endswith("_DSV4")):
        message = f"no sparse MLA kernel of vLLM {release} is built for compute capability {table.capability}"
        yield Unsupported("unsupported_gpu", message, "it may not run there: use Hopper or Blackwell", certain=False)


_CHECKS = (_architecture_reasons, _dtype_reasons, _method_reasons, _kv_dtype_reasons, _attention_reasons, _card_reasons)
