"""What FlashAttention 3 allocates when it sums attention up over several parts of the keys.

Where a batch has too few tiles of queries to fill the card, the kernel gives each tile's keys to several blocks and
adds their sums up afterwards: float32 outputs for every part. An encoder's tiles of pictures are such a batch, since
the kernel counts the tiles of one sequence alone where sequences differ in length (the towers always say they may).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from legroom.facts.gpus import HOPPER
from legroom.facts.releases import release as known_release
from legroom.memory.dtypes import FLOAT32_BYTES
from legroom.units import cdiv

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.vllm.args import EngineSettings

SINCE = "0.14.0"
"""The towers' attention asks for the version of FlashAttention that fits the card; before, always for version 2."""
_MULTIPROCESSORS = 132
_SEQUENCES = 992
"""Up to this many sequences the kernel's schedule is made on the card."""
_TILES = ((64, 192, 192), (96, 192, 144), (128, 128, 176), (192, 128, 112), (256, 128, 80))
"""Widest head, rows of queries and of keys in a tile (tile_size_fwd_sm90, 16-bit, not causal)."""
_FEWEST_KEY_TILES = 5
_NEARLY_FULL, _NEARLY_BEST = 0.8, 0.85


def parts_of_keys(length: int, sequences: int, heads: int, head_dim: int) -> int:
    """Into how many parts FlashAttention 3 cuts the keys (num_splits_heuristic); 1: none."""
    _, queries, keys = next((row for row in _TILES if head_dim <= row[0]), _TILES[-1])
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
