"""What a release cannot run at all: this card, this precision, this quantization, this architecture.

vLLM finds these before or while it builds the model, whatever the memory. Each answer carries its own words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.releases import first_release, latest
from legroom.facts.releases import release as known_release
from legroom.vllm.refusals import Unsupported
from legroom.vllm.traits import is_hybrid, is_moe, uses_mla

if TYPE_CHECKING:
    from collections.abc import Iterator

    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.facts.releases import Release
    from legroom.vllm.args import EngineSettings

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
        from legroom.vllm.quantization_support import quantization_reasons  # noqa: PLC0415 - most models have none

        yield from quantization_reasons(settings, model, gpu, release)
    yield from _kv_cache_dtype(settings, model, gpu, release)
    yield from _card(gpu, release)


def _card(gpu: Gpu, release: Release) -> Iterator[Unsupported]:
    """The published builds hold machine code for a range of cards, and no other."""
    if gpu.vendor != "nvidia" or gpu.compute_capability == _UNKNOWN:
        return
    from legroom.facts.card_support import built_for  # noqa: PLC0415

    oldest, newest = built_for(release)
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
