"""Workspaces that kernels take while a model loads, and that vLLM therefore counts as weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.attention import latent
from legroom.facts.releases import release as known_release
from legroom.memory.weights.module import Module
from legroom.units import MIB

if TYPE_CHECKING:
    from legroom.facts.model import Model, Quantization
    from legroom.memory.weights.storage import StorageContext
    from legroom.vllm.args import EngineSettings

_DEEP_GEMM_BYTES = 32 * MIB
_FLASHINFER_MLA_BYTES = 128 * MIB


def workspace(name: str, size_bytes: int) -> Module:
    """A block of bytes that is no weight."""
    return Module("workspace", name, size_bytes // 4, dtype="float32")


def before_layers(scheme: Quantization | None, context: StorageContext) -> list[Module]:
    """DeepGEMM's, where the linear layers of a checkpoint quantize their inputs to FP8 (0.20+ ships it)."""
    eight_bit_inputs = scheme is not None and scheme.number == "float" and scheme.weight_bits == 8
    # The `fp8` method has imported DeepGEMM before loading is measured.
    if eight_bit_inputs and scheme is not None and scheme.method != "fp8" and _has_deep_gemm(context):
        return [workspace("DeepGEMM", _DEEP_GEMM_BYTES)]
    return []


def with_first_attention(model: Model, settings: EngineSettings, context: StorageContext) -> list[Module]:
    """What the first attention layer brings: DeepGEMM's (MLA, FP8 KV cache) and FlashInfer's MLA workspace."""
    latents = latent(layer.mixer for layer in model.layers)
    out: list[Module] = []
    release = known_release(settings.release)
    # A module-level buffer of the backend, taken on import: 0.11.1 imports every candidate, 0.25 made it lazy.
    if latents and context.vendor == "nvidia" and release.at_least("0.11.1") and release.before("0.25.0"):
        out.append(workspace("FlashInfer MLA", _FLASHINFER_MLA_BYTES))
    if _has_deep_gemm(context) and (latents or settings.kv_cache_dtype.startswith("fp8")):
        out.append(workspace("DeepGEMM", _DEEP_GEMM_BYTES))
    chosen = model.config.get("index_topk")
    if isinstance(chosen, int) and any(mixer.index_head_dim for mixer in latents):
        # Every sparse layer writes the tokens it picked into one shared table.
        out.append(workspace("picked tokens", 4 * settings.max_num_batched_tokens * chosen))
    return out


def _has_deep_gemm(context: StorageContext) -> bool:
    return context.vendor == "nvidia" and context.capability[0] in (9, 10) and context.at_least("0.20.0")
