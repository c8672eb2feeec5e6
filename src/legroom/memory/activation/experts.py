"""The scratch memory of fused experts, by release and kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.gpus import HOPPER
from legroom.facts.model import Experts
from legroom.facts.releases import release as known_release
from legroom.memory.activation.layers import layer_kinds
from legroom.memory.cache import cached_by_model
from legroom.records import dataclass
from legroom.units import cdiv, round_up

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

_DEEP_GEMM_ROWS = 128


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Elements of the experts' buffers over all tokens of the profile run."""

    kept_elements: int = 0
    """Kept for good: alive in every other moment, and while sampling."""
    passing_elements: int = 0
    """Alive inside the experts alone."""


def expert_scratch(model: Model, settings: EngineSettings, gpu: Gpu) -> ExpertScratch:
    """The largest buffers that any expert layer asks for."""
    kinds = cached_by_model(layer_kinds, model)
    blocks = {layer.feedforward for layer, _ in kinds if isinstance(layer.feedforward, Experts)}
    if not blocks:
        return ExpertScratch()
    scratches = [_of_block(block, model, settings, gpu) for block in blocks]
    return max(scratches, key=lambda scratch: scratch.kept_elements + scratch.passing_elements)


def _uses_deep_gemm(model: Model, settings: EngineSettings, gpu: Gpu, inner: int, width: int) -> bool:
    """Block-wise fp8 experts on Hopper and Blackwell servers pad each expert's rows (in the wheel since 0.20)."""
    scheme = model.quantization
    if scheme is None or scheme.block is None or scheme.weight_bits != 8 or gpu.compute_capability[0] not in (9, 10):
        return False
    asked = {settings.given.env.get(name) for name in ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")}
    aligned = inner % _DEEP_GEMM_ROWS == 0 and width % _DEEP_GEMM_ROWS == 0
    return "0" not in asked and aligned and known_release(settings.release).at_least("0.20.0")


def _of_block(block: Experts, model: Model, settings: EngineSettings, gpu: Gpu) -> ExpertScratch:
    release = known_release(settings.release)
    inner = cdiv(block.intermediate_size, 1 if settings.enable_expert_parallel else settings.expert_ranks)
    width = block.latent_size or block.hidden_size
    gate_up = 2 * inner if block.gated else inner
    # The tokens of all data-parallel ranks are gathered before the experts, and their outputs scattered after.
    tokens, top_k = settings.max_num_batched_tokens * settings.data_parallel_size, block.experts_per_token
    gathered = 2 * tokens * width if settings.data_parallel_size > 1 else 0
    if settings.quantization == "mxfp4" and gpu.compute_capability[0] == HOPPER[0]:
        # Triton kernels: a gathered product and a scattered output, freed after each layer.
        return ExpertScratch(passing_elements=tokens * top_k * (inner + width) + gathered)
    if release.at_least("0.13.0"):
        # One workspace that only grows: two buffers, each wide enough for both products.
        chunk = tokens if release.at_least("0.18.0") else min(tokens, 16 * 1024)
        rows = chunk * top_k
        first = max(inner, width)
        if _uses_deep_gemm(model, settings, gpu, inner, width):
            if release.at_least("0.32.0"):
                first = cdiv(first, 2)  # only ever holds FP8, and is sized by bytes now
            local = cdiv(block.num_experts, settings.expert_ranks if settings.enable_expert_parallel else 1)
            rows = round_up(rows + min(rows, local) * (_DEEP_GEMM_ROWS - 1), _DEEP_GEMM_ROWS)
        return ExpertScratch(kept_elements=rows * (first + max(gate_up, width)), passing_elements=gathered)
    chunk = min(tokens, 16 * 1024 if release.at_least("0.12.0") else 32 * 1024)
    if release.before("0.8.0"):
        return ExpertScratch(passing_elements=chunk * top_k * (gate_up + inner + width))
    return ExpertScratch(passing_elements=chunk * top_k * (max(gate_up, width) + inner) + gathered)
