"""Workspaces of attention kernels: FlashAttention 3's split-KV buffers, and FlashInfer's workspace. FlashAttention 3
splits the keys of a query tile over several thread blocks where a batch has too few tiles to fill the card, and keeps a
float32 output per split."""

import math
from collections.abc import Iterable

from legroom.facts.fit import by_release, constants
from legroom.facts.gpus import HOPPER, Gpu
from legroom.facts.model import Attention, Model, latent, with_kv_heads
from legroom.memory.dtypes import FLOAT32_BYTES
from legroom.memory.figure_cache import cached_by_model
from legroom.memory.kv.attention_backend import attention_backend
from legroom.units import MIB, cdiv
from legroom.vllm.args import EngineSettings, named_backend

_LARGEST_SPLIT_BATCH = 992
"""FlashAttention 3 schedules up to this many sequences on the card, and splits no larger batch (flash_api.cpp)."""
_LARGEST_FLASH_ATTENTION_HEAD = 256
_FLASHINFER_HEADS = (64, 128, 256)
_TURING, _AMPERE = (7, 5), (8, 0)


def split_buffers(model: Model, settings: EngineSettings, gpu: Gpu, sequences: int) -> int:
    """Bytes of FlashAttention 3's split-KV outputs and sums in full graphs of `sequences`; 0 if it does not split."""
    named = named_backend(settings.given, settings.release)
    has_fa3 = gpu.vendor == "nvidia" and gpu.compute_capability == HOPPER and (not named or "FLASH_ATTN" in named)
    if not 0 < sequences <= _LARGEST_SPLIT_BATCH or not has_fa3:
        return 0
    splits = by_release(constants()["attention_scratch"]["splits"], settings.release)["count"]
    plain, latents = cached_by_model(_widest_outputs, model, settings.tensor_parallel_size)
    splits_latents = latents and attention_backend(model, settings, gpu).name == "FLASH_ATTN_MLA"
    return int(splits * sequences * (max(plain, latents) if splits_latents else plain) * FLOAT32_BYTES)


def largest_split_buffers(model: Model, settings: EngineSettings, gpu: Gpu, batches: Iterable[int]) -> int:
    """Bytes of split-KV buffers of the largest batch size (in sequences) that FlashAttention 3 splits; 0 if none is."""
    split = (sequences for sequences in batches if sequences <= _LARGEST_SPLIT_BATCH)
    return split_buffers(model, settings, gpu, max(split, default=0))


def flashinfer_workspace(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes of FlashInfer's workspace, allocated with the first batch; 0 with other attention backends."""
    if not _uses_flashinfer(model, settings, gpu):
        return 0
    given = settings.given.env.get("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "")
    if given.isdigit() and settings.release.at_least("0.11.1"):
        return int(given)
    return int(by_release(constants()["attention_scratch"]["flashinfer"], settings.release)["mib"] * MIB)


def _widest_outputs(model: Model, ranks: int) -> tuple[int, int]:
    """Elements per token and rank of the widest attention output with its softmax sums, of (layers whose heads
    FlashAttention takes, MLA layers); 0 where there are none."""
    mixers = [layer.mixer for layer in model.distinct_layers]
    plain = (
        cdiv(mixer.heads, ranks) * (mixer.v_head_dim + 1)
        for mixer in with_kv_heads(mixers)
        if mixer.v_head_dim <= _LARGEST_FLASH_ATTENTION_HEAD
    )
    latents = (cdiv(mixer.heads, ranks) * (mixer.kv_lora_rank + 1) for mixer in latent(mixers))
    return max(plain, default=0), max(latents, default=0)


def _uses_flashinfer(model: Model, settings: EngineSettings, gpu: Gpu) -> bool:
    """Whether FlashInfer is the backend: by flag, on data-centre Blackwell, or where FlashAttention does not run."""
    if settings.engine != "V1" or gpu.vendor != "nvidia":
        return False
    mixers = cached_by_model(_attention_layers, model)
    if not mixers:
        return False
    if named := named_backend(settings.given, settings.release):
        return named.startswith("FLASHINFER") and "MLA" not in named
    if gpu.compute_capability[0] == 10:
        return True
    can = all(mixer.v_head_dim in _FLASHINFER_HEADS and not mixer.sinks for mixer in mixers)
    if not can or settings.release.before("0.11.1") or gpu.compute_capability < _TURING:
        return False
    quantized = settings.kv_cache_dtype.startswith(("fp8", "nvfp4")) and gpu.compute_capability[0] != HOPPER[0]
    return quantized or gpu.compute_capability < _AMPERE


def _attention_layers(model: Model) -> tuple[Attention, ...]:
    """The distinct attention mixers that are neither latent (MLA) nor sparse, that is without an indexer."""
    mixers = with_kv_heads(layer.mixer for layer in model.distinct_layers)
    return tuple(dict.fromkeys(mixer for mixer in mixers if not mixer.index_head_dim))


_FA3_TILES = ((64, 192, 192), (96, 192, 144), (128, 128, 176), (192, 128, 112), (256, 128, 80))
"""Largest head_dim, query rows and key rows of a tile (tile_size_fwd_sm90, 16-bit, not causal)."""


def num_splits(length: int, sequences: int, heads: int, head_dim: int) -> int:
    """Into how many parts FlashAttention 3 (H100, H200) splits `length` keys, for `heads` of `head_dim`; 1: none."""
    multiprocessors = 132
    _, queries, keys = next((row for row in _FA3_TILES if head_dim <= row[0]), _FA3_TILES[-1])
    tiles, key_tiles = heads * cdiv(length, queries), cdiv(length, keys)
    if sequences > _LARGEST_SPLIT_BATCH or tiles >= 0.8 * multiprocessors or key_tiles < 5:
        return 1
    waves = [tiles * splits / multiprocessors for splits in range(1, key_tiles + 1)]
    efficiency = [wave / math.ceil(wave) for wave in waves]
    return next(i for i, share in enumerate(efficiency, 1) if share >= 0.85 * max(efficiency))


def split_kv_bytes(length: int, sequences: int, heads: int, head_dim: int, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes per query token of an encoder's split-KV scratch (outputs and log-sum-exp of all heads), for `sequences`
    sequences of `length` tokens each; 0 where FlashAttention 3 does not split them."""
    # Before 0.14 encoders always use FlashAttention 2.
    is_hopper = gpu.vendor == "nvidia" and gpu.compute_capability[0] == HOPPER[0]
    if not is_hopper or settings.release.before("0.14.0"):
        return 0
    splits = num_splits(length, sequences, heads, head_dim)
    return heads * FLOAT32_BYTES * (splits * (head_dim + 1) + 1) if splits > 1 else 0
