"""Memory that attention kernels ask for outside the profile run: when graphs are captured, or at the first request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legroom.facts.fit import by_release, constants
from legroom.facts.gpus import HOPPER
from legroom.facts.model import latent, with_kv_heads
from legroom.facts.releases import release as known_release
from legroom.memory.dtypes import FLOAT32_BYTES
from legroom.memory.figure_cache import cached_by_model
from legroom.memory.kv.attention_backend import attention_backend
from legroom.units import MIB, cdiv

if TYPE_CHECKING:
    from collections.abc import Iterable

    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Attention, Model
    from legroom.vllm.args import EngineSettings


_LARGEST_SPLIT_BATCH = 992
"""FlashAttention 3 splits no batch of more sequences over the processors."""
_LARGEST_FLASH_ATTENTION_HEAD = 256
_FLASHINFER_HEADS = (64, 128, 256)
_TURING, _AMPERE = (7, 5), (8, 0)


def split_buffers(model: Model, settings: EngineSettings, gpu: Gpu, sequences: int) -> int:
    """FlashAttention 3 in a full graph: float32 partial outputs and their sums, one a split, head and sequence."""
    if not 0 < sequences <= _LARGEST_SPLIT_BATCH or not _uses_flash_attention_3(settings, gpu):
        return 0
    splits = by_release(constants()["attention_scratch"]["splits"], settings.release)["count"]
    return int(splits * sequences * _split_width(model, settings, gpu) * FLOAT32_BYTES)


def largest_split_buffers(model: Model, settings: EngineSettings, gpu: Gpu, batches: Iterable[int]) -> int:
    """Those of the largest batch that is split."""
    split = (sequences for sequences in batches if sequences <= _LARGEST_SPLIT_BATCH)
    return split_buffers(model, settings, gpu, max(split, default=0))


def flashinfer_workspace(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """FlashInfer's buffer, taken when the first batch is laid out: in the trial capture, or the first request."""
    if not _uses_flashinfer(model, settings, gpu):
        return 0
    given = settings.given.env.get("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "")
    if given.isdigit() and known_release(settings.release).at_least("0.11.1"):
        return int(given)
    return int(by_release(constants()["attention_scratch"]["flashinfer"], settings.release)["mib"] * MIB)


def _split_width(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Elements of a token's partial output and its softmax sum, of the widest kind of attention layer that splits."""
    plain, latents = cached_by_model(_widest_outputs, model, settings.tensor_parallel_size)
    splits_latents = latents and attention_backend(model, settings, gpu).name == "FLASH_ATTN_MLA"
    return max(plain, latents) if splits_latents else plain


def _widest_outputs(model: Model, ranks: int) -> tuple[int, int]:
    """Of the layers with heads of keys and values, and of those with a latent."""
    mixers = [layer.mixer for layer in model.layers]
    plain = (
        cdiv(mixer.heads, ranks) * (mixer.v_head_dim + 1)
        for mixer in with_kv_heads(mixers)
        if mixer.v_head_dim <= _LARGEST_FLASH_ATTENTION_HEAD
    )
    latents = (cdiv(mixer.heads, ranks) * (mixer.kv_lora_rank + 1) for mixer in latent(mixers))
    return max(plain, default=0), max(latents, default=0)


def _uses_flash_attention_3(settings: EngineSettings, gpu: Gpu) -> bool:
    named = _named_backend(settings)
    return gpu.vendor == "nvidia" and gpu.compute_capability == HOPPER and (not named or "FLASH_ATTN" in named)


def _uses_flashinfer(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """First choice on Blackwell servers; elsewhere where FlashAttention cannot: a quantized KV cache, or Turing."""
    if settings.engine != "V1" or gpu.vendor != "nvidia":
        return False
    mixers = cached_by_model(_attention_layers, model)
    if not mixers:
        return False
    if named := _named_backend(settings):
        return named.startswith("FLASHINFER") and "MLA" not in named
    if gpu.compute_capability[0] == 10:
        return True
    can = all(mixer.v_head_dim in _FLASHINFER_HEADS and not mixer.sinks for mixer in mixers)
    if not can or known_release(settings.release).before("0.11.1") or gpu.compute_capability < _TURING:
        return False
    quantized = settings.kv_cache_dtype.startswith(("fp8", "nvfp4")) and gpu.compute_capability[0] != HOPPER[0]
    return quantized or gpu.compute_capability < _AMPERE


def _attention_layers(model: Model) -> tuple[Attention, ...]:
    """Every kind that keeps keys and values and has no indexer."""
    mixers = with_kv_heads(layer.mixer for layer in model.layers)
    return tuple(dict.fromkeys(mixer for mixer in mixers if not mixer.index_head_dim))


def _named_backend(settings: EngineSettings) -> str:
    return (settings.given.attention_backend or settings.given.env.get("VLLM_ATTENTION_BACKEND") or "").upper()


SINCE = "0.14.0"
"""The towers' attention asks for the version of FlashAttention that fits the card; before, always for version 2."""
_MULTIPROCESSORS = 132
_SEQUENCES = 992
"""Up to this many sequences the kernel's schedule is made on the card."""
_FA3_TILES = ((64, 192, 192), (96, 192, 144), (128, 128, 176), (192, 128, 112), (256, 128, 80))
"""Widest head, rows of queries and of keys in a tile (tile_size_fwd_sm90, 16-bit, not causal)."""
_FEWEST_KEY_TILES = 5
_NEARLY_FULL, _NEARLY_BEST = 0.8, 0.85


def parts_of_keys(length: int, sequences: int, heads: int, head_dim: int) -> int:
    """Into how many parts FlashAttention 3 cuts the keys (num_splits_heuristic); 1: none."""
    _, queries, keys = next((row for row in _FA3_TILES if head_dim <= row[0]), _FA3_TILES[-1])
    tiles, key_tiles = heads * cdiv(length, queries), cdiv(length, keys)
    crowded = tiles >= _NEARLY_FULL * _MULTIPROCESSORS
    if sequences > _SEQUENCES or crowded or key_tiles < _FEWEST_KEY_TILES:
        return 1
    waves = [tiles * parts / _MULTIPROCESSORS for parts in range(1, key_tiles + 1)]
    filled = [wave / math.ceil(wave) for wave in waves]
    return next(i for i, share in enumerate(filled, 1) if share >= _NEARLY_BEST * max(filled))


def split_key_bytes(length: int, sequences: int, heads: int, head_dim: int, settings: EngineSettings, gpu: Gpu) -> int:
    """Partial outputs of one query, and the logarithms of its sums; 0 where keys stay whole."""
    if gpu.vendor != "nvidia" or gpu.compute_capability[0] != HOPPER[0]:
        return 0
    if known_release(settings.release).before(SINCE):
        return 0
    parts = parts_of_keys(length, sequences, heads, head_dim)
    return heads * FLOAT32_BYTES * (parts * (head_dim + 1) + 1) if parts > 1 else 0
