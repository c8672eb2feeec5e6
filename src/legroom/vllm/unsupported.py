"""What a release cannot run at all: this card, this precision, this quantization, this architecture.

vLLM finds these before or while it builds the model, whatever the memory. Each answer carries its own words. A
quantization is checked in vLLM's own order: `ModelConfig._verify_quantization`, then the method's config, the card, the
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model, Quantization
from legroom.facts.release_support import (
    amd_methods,
    is_deprecated,
    plugin_of,
    quantization_method,
    quantization_methods,
    scheme_capability,
)
from legroom.facts.releases import Release, first_release, latest
from legroom.facts.releases import release as known_release
from legroom.vllm.args import EngineSettings, is_given
from legroom.vllm.setting_checks import Unsupported
from legroom.vllm.traits import is_hybrid, is_moe, uses_mla

_TRANSFORMERS_BACKEND = "0.7.1"
"""From here on an architecture that vLLM lacks may run on its Transformers backend."""
_UNKNOWN = (0, 0)


def unsupported(settings: EngineSettings, model: Model, gpu: Gpu) -> Unsupported | None:
    """What the release refuses first; what is certain comes before what may be."""
    found = list(_reasons(settings, model, gpu, known_release(settings.release)))
    return next((one for one in found if one.certain), found[0] if found else None)


def _reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    yield from _architecture(model, release)
    yield from _dtype(settings, gpu)
    if settings.quantization or settings.given.quantization:
        from legroom.vllm.unsupported import quantization_reasons  # most models have none

        yield from quantization_reasons(settings, model, gpu, release)
    yield from _kv_cache_dtype(settings, model, gpu, release)
    yield from _card(gpu, release)


def _card(gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """The published builds hold machine code for a range of cards, and no other."""
    if gpu.vendor != "nvidia" or gpu.compute_capability == _UNKNOWN:
        return
    from legroom.facts.release_support import supported_capabilities

    oldest, newest = supported_capabilities(release)
    message = "CUDA error: no kernel image is available for execution on the device"
    if gpu.compute_capability < oldest:
        yield Unsupported(
            "unsupported_gpu",
            message,
            f"vLLM {release} is built for compute capability {_version(oldest)} and up, {gpu.name} has "
            f"{_version(gpu.compute_capability)}",
        )
    elif gpu.compute_capability[0] > newest[0]:
        # Cards newer than a release were served by builds of the card's own vendor before the wheels had them.
        yield Unsupported(
            "unsupported_gpu",
            message,
            f"the published builds of vLLM {release} end at compute capability {_version(newest)}; {gpu.name} has "
            f"{_version(gpu.compute_capability)}: use vLLM 0.9.0 or later, or a build of your own",
            certain=False,
        )


def _dtype(settings: EngineSettings, gpu: Gpu) -> Iterator[Unsupported]:
    if settings.dtype != "bfloat16" or not _lacks(gpu, (8, 0)):
        return
    yield Unsupported(
        "unsupported_dtype",
        "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
        f"Your {gpu.name} GPU has compute capability {_version(gpu.compute_capability)}. You can use float16 instead "
        "by explicitly setting the `dtype` flag in CLI, for example: --dtype=half.",
        "add --dtype half",
    )


def _kv_cache_dtype(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """FP8 keys and values on cards without FP8: FlashInfer reads them, Triton and FlexAttention do not."""
    if not settings.kv_cache_dtype.startswith("fp8") or not _lacks(gpu, (8, 9)):
        return
    if settings.engine == "V0" or release.before("0.11.0") or uses_mla(model):
        return
    capability = _version(gpu.compute_capability)
    flashinfer_from = (8, 0) if release.at_least("0.24.0") else (7, 5)
    if release.at_least("0.11.1") and gpu.compute_capability >= flashinfer_from:
        return
    suggested = "float16" if _lacks(gpu, (8, 0)) else "bfloat16"
    message = "type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')"
    if release.at_least("0.24.0"):
        message = (
            f"FP8 KV cache is not supported by the Triton attention backend on {gpu.name} (compute capability "
            f"{capability}); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype {suggested}."
        )
    elif release.before("0.11.1") and _lacks(gpu, (8, 0)):
        message = "FlexAttention does not support quantized kv-cache. Yet"
    yield Unsupported("unsupported_kv_cache_dtype", message, "leave --kv-cache-dtype out: the cache follows the model")


def _architecture(model: Model, release: Release) -> Iterator[Unsupported]:
    """A model that came to vLLM with a later release."""
    if release.version == latest().version:
        return  # it has all that legroom knows of
    since = first_release(model.architecture)
    if since is None or not release.before(since):
        return
    # The Transformers backend began with dense text models; what it lacks, the release cannot run.
    dense_text = not (is_moe(model) or is_hybrid(model) or uses_mla(model) or model.modalities)
    yield Unsupported(
        "unsupported_architecture",
        f"Model architectures ['{model.architecture}'] are not supported for now.",
        f"vLLM has {model.architecture} since {since}: use that release or a later one",
        certain=release.before(_TRANSFORMERS_BACKEND) or (not dense_text and release.before("0.11.1")),
    )


def _lacks(gpu: Gpu, needed: tuple[int, int]) -> bool:
    return gpu.vendor == "nvidia" and _UNKNOWN < gpu.compute_capability < needed


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


_ID = "unsupported_quantization"
_MARLIN_BITS = (4, 8)
_RUNS_ALSO = {
    "gptq": {"gptq", "auto_gptq", "moe_wna16", "gptq_bitblas", "exllama", "humming", "inc", "auto-round"},
    "awq": {"awq", "auto_awq", "moe_wna16", "humming", "inc", "auto-round"},
    "modelopt": {"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "petit_nvfp4", "nvfp4"},
    "mxfp4": {"mxfp4", "gpt_oss_mxfp4", "humming"},
    "fp8": {"fp8", "deepseek_v4_fp8", "humming"},
    "compressed-tensors": {"compressed-tensors", "humming"},
}
"""Names that may stand for a checkpoint's method: each release's `override_quantization_method`."""
_MARLIN_NAMES = {"gptq": ("gptq_marlin", "marlin"), "awq": ("awq_marlin", "marlin")}
_ONLINE_SHORTHANDS = ("online", "fp8_per_", "int8_per_", "nvfp4_per_")
_CONFIG_CLASSES = {
    "compressed-tensors": "CompressedTensorsConfig",
    "quark": "QuarkConfig",
    "torchao": "TorchAOConfig",
    "fbgemm_fp8": "FBGEMMFp8Config",
    "fp_quant": "FPQuantConfig",
}


def quantization_reasons(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """What the release has against the quantization that the flag and the checkpoint name."""
    asked = (settings.given.quantization or "").lower() or None
    stated = _stated(model)
    method = _method_in_use(asked, model, gpu, release)
    if quantization_method(method, release) is None:
        yield _unknown(method, release)
        return
    mismatch = _mismatch(asked, stated, model, gpu, release)
    if mismatch is not None:
        yield mismatch
        return
    if is_deprecated(method, release) and not is_given(settings.given, "--allow-deprecated-quantization"):
        yield Unsupported(
            _ID,
            f"The quantization method {method} is deprecated and will be removed in future versions of vLLM. To "
            "bypass, set `--allow-deprecated-quantization`.",
            "add --allow-deprecated-quantization, or use another checkpoint",
        )
    yield from _on_plain(method, stated, model, release)
    yield from _on_card(method, model, gpu, release)
    yield from _in_dtype(method, settings.dtype, release)


def _unknown(method: str, release: Release) -> Unsupported:
    package = plugin_of(method, release)
    message = f"Unknown quantization method: {method}. Must be one of {list(quantization_methods(release))}."
    if package:
        return Unsupported(_ID, message, f"vLLM {release} runs {method} with {package} installed", certain=False)
    return Unsupported(_ID, message, f"vLLM {release} has no quantization method {method}")


def _mismatch(asked: str | None, stated: str | None, model: Model, gpu: Gpu, release: Release) -> Unsupported | None:
    """A flag that names another method than the checkpoint's config, which vLLM takes for a mistake."""
    if asked is None or stated is None or _stands_for(asked, stated, model, gpu, release):
        return None
    message = (
        f"Quantization method specified in the model config ({stated}) does not match the quantization method "
        f"specified in the `quantization` argument ({asked})."
    )
    return Unsupported(
        _ID, message, "leave --quantization out: the checkpoint says what it is", certain=_is_own_config(model)
    )


def _on_plain(method: str, stated: str | None, model: Model, release: Release) -> Iterator[Unsupported]:
    """A method that needs a quantized checkpoint, asked of one that is not."""
    known = quantization_method(method, release)
    if stated is not None or model.quantization is not None or known is None or known.of_plain == "online":
        return
    message = f"Cannot find the config file for {method}"
    if known.of_plain == "arguments":
        name = _CONFIG_CLASSES.get(method, f"the config of {method}")
        message = f"{name}.__init__() missing required positional arguments"
    yield Unsupported(
        _ID,
        message,
        f"{method} takes a checkpoint that was quantized before: use one, or --quantization fp8",
        certain=_is_own_config(model),
    )


def _on_card(method: str, model: Model, gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    if gpu.vendor == "amd":
        supported = amd_methods(release)
        if supported is not None and method not in supported:
            yield Unsupported(
                _ID,
                f"{method} quantization is currently not supported in rocm.",
                "use a checkpoint in a format that this release runs on AMD cards",
            )
        return
    capability = 10 * gpu.compute_capability[0] + gpu.compute_capability[1]
    if gpu.vendor != "nvidia" or not capability:
        return
    known = quantization_method(method, release)
    needed = known.min_capability if known else 0
    if capability < needed:
        yield Unsupported(
            _ID,
            f"The quantization method {method} is not supported for the current GPU. Minimum capability: {needed}. "
            f"Current capability: {capability}.",
            f"use a checkpoint in a format that runs on {gpu.name}",
        )
    elif method == "compressed-tensors" and model.quantization is not None:
        yield from _scheme_on_card(model.quantization, gpu, capability, release)


def _scheme_on_card(scheme: Quantization, gpu: Gpu, capability: int, release: Release) -> Iterator[Unsupported]:
    """compressed-tensors holds many formats, and asks about each when it builds a layer."""
    needed = scheme_capability(_scheme_name(scheme), release)
    if needed is None:
        yield Unsupported(
            _ID, "No compressed-tensors compatible scheme was found.", f"vLLM {release} does not read this format yet"
        )
    elif capability < needed:
        yield Unsupported(
            _ID,
            f"Quantization scheme is not supported for the current GPU. Min capability: {needed}. Current capability: "
            f"{capability}.",
            f"use a checkpoint in a format that runs on {gpu.name}",
        )


def _scheme_name(scheme: Quantization) -> str:
    if scheme.number == "float":
        if scheme.weight_bits == 4:
            return "mxfp4" if scheme.group_size == 32 else "nvfp4"
        return "fp8"
    activations = scheme.dynamic_activations or scheme.static_activations
    return "int8" if activations and scheme.weight_bits == 8 else "int_16bit_activations"


def _in_dtype(method: str, dtype: str, release: Release) -> Iterator[Unsupported]:
    known = quantization_method(method, release)
    if known is None or not known.dtypes or dtype in known.dtypes:
        return
    names = ", ".join(f"torch.{name}" for name in known.dtypes)
    yield Unsupported(
        _ID,
        f"torch.{dtype} is not supported for quantization method {method}. Supported dtypes: [{names}]",
        f"add --dtype {'half' if known.dtypes[-1] == 'float16' else known.dtypes[-1]}",
    )


def _stated(model: Model) -> str | None:
    """What the checkpoint's config calls its method, in its own spelling."""
    if model.quantization is None:
        return None
    for holder in (model.config, model.config.get("text_config")):
        section = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if isinstance(section, Mapping) and section.get("quant_method"):
            return str(section["quant_method"]).lower().replace("compressed_tensors", "compressed-tensors")
    return model.quantization.method


def _method_in_use(asked: str | None, model: Model, gpu: Gpu, release: Release) -> str:
    """What the release ends up with: the checkpoint's method, by faster kernels where they run."""
    scheme = model.quantization
    stated = _stated(model)
    if scheme is None or stated is None:
        return asked or ""
    if asked is not None and (not _stands_for(asked, stated, model, gpu, release) or asked not in ("marlin",)):
        return asked
    own = scheme.method if scheme.method.startswith("modelopt") else stated
    marlin = next(iter(_MARLIN_NAMES.get(own, ())), "")
    if marlin and _marlin_runs(marlin, scheme, gpu, release):
        return marlin
    if own == "modelopt_fp4" and release.before("0.9.0"):
        return "nvfp4"
    return own


def _stands_for(asked: str, stated: str, model: Model, gpu: Gpu, release: Release) -> bool:
    if asked == stated or asked.startswith(_ONLINE_SHORTHANDS) or asked == "humming":
        return True
    scheme = model.quantization
    family = "modelopt" if stated.startswith("modelopt") else scheme.method if scheme else stated
    if asked in _MARLIN_NAMES.get(family, ()):
        return scheme is not None and _marlin_runs(_MARLIN_NAMES[family][0], scheme, gpu, release)
    return asked in _RUNS_ALSO.get(family, {stated})


def _marlin_runs(marlin: str, scheme: Quantization, gpu: Gpu, release: Release) -> bool:
    known = quantization_method(marlin, release)
    if known is None or gpu.vendor != "nvidia":
        # 0.14+ reads the name on AMD cards, and runs its own kernels.
        return known is not None and release.at_least("0.14.0")
    capability = 10 * gpu.compute_capability[0] + gpu.compute_capability[1]
    needed = known.min_capability if release.before("0.22.0") else 75
    return scheme.weight_bits in _MARLIN_BITS and (not capability or capability >= needed)


def _is_own_config(model: Model) -> bool:
    """Whether the config is the checkpoint's own: transformers signs what it writes. One that people typed from what
    they know of a model may name its quantization loosely, or leave it out."""
    return model.source.startswith("bundled") or "transformers_version" in model.config
