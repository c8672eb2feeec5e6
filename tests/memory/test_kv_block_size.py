from __future__ import annotations

from typing import Any

import pytest
from kv_cases import H100, settings

from legroom.facts.gpus import Gpu
from legroom.facts.model import Attention, LatentAttention, Layer, Mixer, Model, StateSpace
from legroom.memory.kv.layer_specs import block_size, kv_specs
from legroom.vllm.args import ServeArgs

B200 = Gpu("NVIDIA B200", 180 * 2**30, compute_capability=(10, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", 79 * 2**30, compute_capability=(8, 0))
LATENT = LatentAttention(128, 512, 1536, 128, 64, 128)
SPARSE = LatentAttention(128, 512, 1536, 128, 64, 128, 64, 128)
HEADS = Attention(32, 2, 128, 128)
MAMBA2 = StateSpace(
    "mamba2",
    (
        ("chunk_size", 128),
        ("conv_kernel", 4),
        ("head_dim", 64),
        ("intermediate_size", 4096),
        ("n_groups", 8),
        ("num_heads", 64),
        ("state_size", 128),
    ),
)


def model(*mixers: Mixer, architecture: str = "SomeForCausalLM") -> Model:
    layers = tuple(Layer(mixer, None) for mixer in mixers)
    return Model("", architecture, "", "bfloat16", 4096, 32000, 131072, layers)


def size(mixed: Model, version: str, gpu: Gpu = H100, **changes: Any) -> int:
    return block_size(mixed, settings(version, **changes), gpu)


@pytest.mark.parametrize("version", ["0.6.0", "0.9.2", "0.17.1", "0.32.0"])
def test_plain_attention_has_blocks_of_16(version: str) -> None:
    assert size(model(HEADS), version) == 16
    assert size(model(HEADS), version, block_size=32) == 32


def test_intels_kernels_take_blocks_of_64_and_triton_takes_16() -> None:
    card = Gpu("Intel Arc Pro B60", 24 * 2**30, vendor="intel")
    assert [size(model(HEADS), version, card) for version in ("0.16.0", "0.32.0")] == [64, 64]
    assert size(model(LATENT), "0.32.0", card) == 64
    assert size(model(MAMBA2, HEADS), "0.32.0", card) % 64 == 0
    assert size(model(HEADS), "0.32.0", card, given=ServeArgs(attention_backend="TRITON_ATTN")) == 16


def test_flash_attention_4_has_one_page_size_for_wide_heads() -> None:
    global_heads, wide = model(HEADS, Attention(16, 2, 512, 512)), model(Attention(16, 2, 256, 256))
    assert size(global_heads, "0.32.0", kv_cache_dtype="fp8") == 64
    assert size(global_heads, "0.32.0") == size(global_heads, "0.28.0", kv_cache_dtype="fp8") == 16
    by_flag = ServeArgs(attention_backend="FLASH_ATTN")
    assert size(wide, "0.32.0", B200, given=by_flag) == 128
    assert size(wide, "0.32.0", B200) == size(wide, "0.32.0", given=by_flag) == 16


def test_turboquant_blocks_cover_the_boundary_layers_in_the_models_dtype() -> None:
    packed = {"kv_cache_dtype": "turboquant_k8v4"}
    deep = model(*[HEADS] * 6)
    assert size(deep, "0.32.0", **packed) == 32
    assert size(deep, "0.32.0", block_size=64, **packed) == 64
    assert size(deep, "0.22.1", **packed) == 16
    specs = kv_specs(deep, settings("0.32.0", **packed), H100, 0)
    assert [spec.bytes_of_token for spec in specs.values()] == [1024, 1024, 392, 392, 1024, 1024]


@pytest.mark.parametrize(
    ("version", "gpu", "tokens"),
    [
        ("0.8.0", H100, 64),
        ("0.17.1", H100, 64),
        ("0.18.0", H100, 16),
        ("0.32.0", H100, 16),
        ("0.10.2", B200, 128),
        ("0.14.0", B200, 128),
        ("0.17.1", B200, 64),
        ("0.18.0", B200, 32),
        ("0.17.1", A100, 16),
    ],
)
def test_latent_attention_takes_its_backends_block(version: str, gpu: Gpu, tokens: int) -> None:
    assert size(model(LATENT), version, gpu) == tokens


def test_an_fp8_latent_cache_goes_back_to_flashmla_on_hopper() -> None:
    assert size(model(LATENT), "0.32.0", kv_cache_dtype="fp8") == 64


def test_flashmla_overruled_the_user_until_it_took_multiples() -> None:
    assert size(model(LATENT), "0.11.0", block_size=128) == 64
    assert size(model(LATENT), "0.12.0", block_size=128) == 128
    assert size(model(LATENT), "0.12.0", block_size=32) == 64


def test_sparse_latent_attention_has_blocks_of_64() -> None:
    assert size(model(SPARSE), "0.32.0") == 64


def test_a_backend_can_be_named() -> None:
    assert size(model(LATENT), "0.32.0", given=ServeArgs(attention_backend="FLASHMLA")) == 64
    assert size(model(LATENT), "0.9.2", given=ServeArgs(env={"VLLM_ATTENTION_BACKEND": "TRITON_MLA"})) == 16


def test_a_hybrid_block_is_the_least_that_holds_a_state() -> None:
    hybrid = model(MAMBA2, HEADS)
    state_bytes = (3 * (4096 + 2 * 8 * 128) + 64 * 64 * 128) * 2
    tokens = size(hybrid, "0.32.0")
    assert tokens % 16 == 0
    assert (tokens - 16) * 1024 < state_bytes <= tokens * 1024


def test_a_larger_block_of_the_user_stays() -> None:
    assert size(model(MAMBA2, HEADS), "0.19.0", block_size=4096, enable_prefix_caching=False) == 4096


def test_keeping_all_states_rounds_the_block_to_the_scan_chunk() -> None:
    assert size(model(MAMBA2, HEADS), "0.26.0") % 128 == 0


def test_nemotron_keeps_its_states_in_float32() -> None:
    plain, nemotron = model(MAMBA2, HEADS), model(MAMBA2, HEADS, architecture="NemotronHForCausalLM")
    assert size(nemotron, "0.32.0") > 1.9 * size(plain, "0.32.0")
    narrow = ServeArgs(mamba_ssm_cache_dtype="bfloat16")
    assert size(nemotron, "0.32.0", given=narrow) == size(plain, "0.32.0")
