"""Buffers of attention kernels that the profile run does not see."""

from __future__ import annotations

import pytest
from recorded_runs import H200, models, settle

from legroom.facts.gpus import gpu
from legroom.memory.attention_workspace import flashinfer_workspace, split_buffers
from legroom.units import MIB

LLAMA = models()["g-llama"]
HEADS, HEAD_DIM = 32, 128


def test_flash_attention_3_keeps_float32_outputs_and_sums_for_every_split() -> None:
    settings = settle(LLAMA, "0.32.0")
    assert split_buffers(LLAMA, settings, H200, 256) == 32 * 256 * HEADS * (HEAD_DIM + 1) * 4


def test_tensor_parallel_ranks_share_the_split_heads() -> None:
    alone, shared = settle(LLAMA, "0.32.0"), settle(LLAMA, "0.32.0", tensor_parallel_size=4)
    assert split_buffers(LLAMA, alone, H200, 256) == 4 * split_buffers(LLAMA, shared, H200, 256)


def test_releases_before_0_11_bound_the_splits_at_sixteen() -> None:
    settings = settle(LLAMA, "0.10.2")
    assert split_buffers(LLAMA, settings, H200, 64) == 16 * 64 * HEADS * (HEAD_DIM + 1) * 4


def test_a_batch_of_more_than_992_sequences_is_not_split() -> None:
    settings = settle(LLAMA, "0.32.0")
    assert split_buffers(LLAMA, settings, H200, 992) > 0
    assert split_buffers(LLAMA, settings, H200, 1008) == 0


@pytest.mark.parametrize("name", ["a100 80gb", "rtx 4090", "b200", "rtx 5090", "mi300x"])
def test_only_hopper_splits(name: str) -> None:
    card = gpu(name)
    assert split_buffers(LLAMA, settle(LLAMA, "0.26.0", card), card, 256) == 0


def test_another_attention_backend_does_not_split() -> None:
    settings = settle(LLAMA, "0.26.0", attention_backend="TRITON_ATTN")
    assert split_buffers(LLAMA, settings, H200, 256) == 0


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "mib"),
    [
        ("b200", "auto", 394),
        ("rtx 5090", "auto", 0),
        ("rtx 5090", "fp8", 394),
        ("a100 80gb", "fp8", 394),
        ("t4", "auto", 394),
    ],
)
def test_flashinfer_serves_blackwell_servers_turing_and_quantized_caches(
    name: str, kv_cache_dtype: str, mib: int
) -> None:
    card = gpu(name)
    settings = settle(LLAMA, "0.25.0", card, kv_cache_dtype=kv_cache_dtype, max_model_len=8192, dtype="float16")
    assert flashinfer_workspace(LLAMA, settings, card) == mib * MIB


def test_hopper_reads_an_fp8_cache_with_flash_attention() -> None:
    assert flashinfer_workspace(LLAMA, settle(LLAMA, "0.25.0", kv_cache_dtype="fp8"), H200) == 0


def test_the_workspace_is_as_large_as_the_environment_says() -> None:
    env = {"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": str(64 * MIB)}
    settings = settle(LLAMA, "0.25.0", attention_backend="FLASHINFER", env=env)
    assert flashinfer_workspace(LLAMA, settings, H200) == 64 * MIB
