"""When FlashAttention 3 sums attention up over parts of the keys, and what that takes."""

from __future__ import annotations

import pytest
from recorded_runs import H200, settle

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.memory.attention_workspace import num_splits, split_kv_bytes

LLAMA = load("llama-3.1-8b")


@pytest.mark.parametrize(
    ("tower", "length", "sequences", "head_dim", "parts"),
    [
        ("InternVL3's tiles of 448 pixels", 1025, 128, 64, 4),
        ("Phi-4-multimodal's tiles of 448 pixels", 1024, 37, 72, 4),
        ("SigLIP at 384 pixels", 729, 11, 72, 2),
        ("Llama 4's tiles of 336 pixels", 577, 51, 88, 2),
        ("CLIP at 336 pixels, whose keys make four tiles", 577, 14, 64, 1),
        ("Gemma 3's 896 pixels, which fill the card", 4096, 32, 72, 1),
        ("more sequences than are scheduled on the card", 1025, 993, 64, 1),
    ],
)
def test_keys_are_cut_where_queries_do_not_fill_the_card(
    tower: str, length: int, sequences: int, head_dim: int, parts: int
) -> None:
    assert num_splits(length, sequences, 16, head_dim) == parts, tower


def test_partial_sums_are_those_recorded_for_internvl3() -> None:
    # 2,191,565,828 bytes in the allocation history of vLLM 0.32.0 on an H200: four partial outputs, the logarithms of
    # their sums and of the whole, and 1,028 bytes of counters.
    settings = settle(LLAMA, "0.32.0")
    assert 128 * 1025 * split_kv_bytes(1025, 128, 16, 64, settings, H200) == 2_191_565_828 - 1_028


def test_a_card_without_flash_attention_3_takes_nothing_for_them() -> None:
    assert split_kv_bytes(1025, 128, 16, 64, settle(LLAMA, "0.32.0"), gpu("a100-80gb")) == 0


def test_releases_that_always_asked_for_version_2_take_nothing_for_them() -> None:
    assert split_kv_bytes(1025, 128, 16, 64, settle(LLAMA, "0.13.0"), H200) == 0
