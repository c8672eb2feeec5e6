"""Logits and the sampler's scratch in the profile run, by release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from legroom.facts.releases import release as known_release
from legroom.units import cdiv

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings


@dataclass(frozen=True, slots=True)
class Sampling:
    """Bytes alive while the profile run samples, beside the hidden states."""

    bytes: int
    how: str


# Bytes for each logit alive at once in the sampler. 14: the model's own copy (2) + float32 (4) + softmax (4) + noise (4).
_MASKED_SAMPLER = 14
# Sorting in float32 keeps values, 64-bit indices and the radix sort's own buffers: 38 in all, measured 0.10-0.16.
_SORTING_SAMPLER = 38
_MULTIPROCESSORS = {
    (9, 0): 132,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 128,
    (7, 5): 40,
    (10, 0): 148,
    (12, 0): 188,
    (12, 1): 48,
}


def sampling(model: Model, settings: EngineSettings, gpu: Gpu) -> Sampling:
    """The logits of every sequence, and what the release's sampler needs to draw from them."""
    release = known_release(settings.release)
    sequences = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    width = 2 if settings.dtype in ("bfloat16", "float16", "half") else 4
    logits = sequences * model.vocab_size
    softcap = 2 if model.config.get("final_logit_softcapping") else 1
    if settings.engine == "V1" and release.before("0.7.3"):
        # All batched tokens got logits, and no sampler ran.
        everything = settings.max_num_batched_tokens * model.vocab_size
        return Sampling(everything * width * softcap, "batched tokens x vocabulary")
    if settings.engine == "V1" and (settings.runner == "V2" or release.before("0.8.0")):
        return Sampling(logits * width * softcap, "sequences x vocabulary, no sampler scratch")
    if settings.engine == "V1" and release.at_least("0.17.0"):
        programs = _MULTIPROCESSORS.get(gpu.compute_capability, 108)
        rows = min(1 << (sequences - 1).bit_length(), programs) if sequences >= 8 else 0
        scratch = rows * model.vocab_size * 4
        return Sampling(
            logits * (_MASKED_SAMPLER - 2 + width) + scratch, "14 bytes x sequences x vocabulary + top-k scratch"
        )
    return Sampling(logits * (_SORTING_SAMPLER - 2 + width), "38 bytes x sequences x vocabulary: the sampler sorts")


def gathered_logits_width(model: Model, ranks: int) -> int:
    """The vocabulary one rank computes before the gather."""
    return cdiv(model.vocab_size, ranks)
