"""Logits and the sampler's scratch in the profile run, by release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.fit import constants
from legroom.facts.releases import release as known_release
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

# Bytes for each logit alive at once, beside the model's own copy: float32 logits, softmax and noise.
_MASKING = 12
# The sampler that sorts keeps values, 64-bit indices and the radix sort's own buffers: 36 beside the model's copy.
_SORTING = 36
# With speculative tokens a rejection sampler runs over one draft token a sequence: 28 beside the model's copy.
_REJECTING = 28
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Bytes alive while the profile run samples, beside the hidden states."""

    bytes: int
    kept_bytes: int
    """The part that stays for the next call: a scratch row a running program."""
    how: str
    least_bytes: int = -1
    """What it is where the installation has FlashInfer's sampler; -1: that makes no difference."""


def sampling(model: Model, settings: EngineSettings, gpu: Gpu) -> Sampling:
    """The logits of every sequence, and what the release's sampler needs to draw from them."""
    release = known_release(settings.release)
    sequences = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    width = dtype_bytes(settings.dtype)
    logits = sequences * model.vocab_size
    copies = 2 if model.config.get("final_logit_softcapping") else 1
    if settings.engine == "V1" and release.before("0.7.3"):
        everything = settings.max_num_batched_tokens * model.vocab_size
        return Sampling(everything * width * copies, 0, "batched tokens x vocabulary: every token gets logits")
    if settings.engine == "V1" and (settings.runner == "V2" or release.before("0.8.0")):
        if settings.tensor_parallel_size > 1:
            copies = max(copies, 2)
        return Sampling(logits * width * copies, 0, "sequences x vocabulary; this runner profiles no sampler")
    if settings.engine == "V1" and release.at_least("0.17.0") and sequences >= 8:
        scratch = scratch_rows(gpu, sequences) * model.vocab_size * FLOAT32_BYTES
        rejecting = settings.num_speculative_tokens > 0
        each = (_REJECTING if rejecting else _MASKING) + width
        return Sampling(logits * each + scratch, scratch, f"{each} bytes x sequences x vocabulary + top-k scratch")
    each, masking = _SORTING + width, logits * (_MASKING + width)
    wish = settings.given.env.get("VLLM_USE_FLASHINFER_SAMPLER")
    takes_flashinfer = settings.engine == "V1" and gpu.vendor == "nvidia" and gpu.compute_capability >= _AMPERE
    if takes_flashinfer and wish == "1":
        return Sampling(masking, 0, f"{_MASKING + width} bytes x sequences x vocabulary: FlashInfer's sampler")
    # Until 0.11.0 FlashInfer's sampler ran wherever FlashInfer was installed: in the images, not with pip.
    maybe = takes_flashinfer and wish is None and release.before("0.11.1")
    how = f"{each} bytes x sequences x vocabulary: this sampler sorts"
    return Sampling(logits * each, 0, how, masking if maybe else -1)


def scratch_rows(gpu: Gpu, sequences: int) -> int:
    """Rows of the top-k kernel's buffer: one a running program, at most one a multiprocessor."""
    known = constants()["multiprocessors"]
    by_name = next((count for name, count in known["by_name"].items() if name in gpu.name.lower()), None)
    capability = ".".join(str(part) for part in gpu.compute_capability)
    processors = int(by_name or known["by_capability"].get(capability, known["unknown"]))
    programs = min(processors, sequences)
    return min(1 << (programs - 1).bit_length(), processors)
