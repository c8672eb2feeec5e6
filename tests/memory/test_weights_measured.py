"""vLLM 0.26.0 on an H200: the bytes its worker measured after loading dummy weights, equal to the last one."""

from __future__ import annotations

from typing import Any

import pytest
from weight_cases import (
    AWQ,
    DEEPSEEK_V2_LITE,
    FP8_BLOCKS,
    FP8_CHANNELS,
    GEMMA3_12B,
    GPT_OSS_20B,
    H200,
    LLAMA_8B,
    MIB,
    QWEN3_30B,
    QWEN25_7B,
    model,
    settings,
)

from legroom.facts.gpus import Gpu
from legroom.memory.weights.loaded import weights
from legroom.vllm.args import ServeArgs


@pytest.mark.parametrize(
    ("config", "changes", "expected_bytes"),
    [
        pytest.param(LLAMA_8B, {"runner": "V2"}, 16110920192, id="llama-8b"),
        pytest.param(LLAMA_8B, {}, 16110919680, id="llama-8b on runner V1"),
        pytest.param(QWEN25_7B, {"runner": "V2"}, 15374945792, id="qwen2.5-7b: 1.5 MiB of every 26 MiB block unused"),
        pytest.param(GEMMA3_12B, {"runner": "V2"}, 24286650880, id="gemma-3: two rope tables"),
        pytest.param(QWEN3_30B, {}, 61075902464, id="qwen3-30b-a3b"),
        pytest.param(DEEPSEEK_V2_LITE, {"runner": "V2"}, 31505036800, id="deepseek-v2-lite"),
        pytest.param(
            DEEPSEEK_V2_LITE,
            {"runner": "V2", "enforce_eager": True},
            31517619712,
            id="eager keeps a float32 rope table",
        ),
        pytest.param(LLAMA_8B, {"runner": "V2", "kv_cache_dtype": "fp8"}, 16144474624, id="fp8 kv brings DeepGEMM"),
        pytest.param(
            {**LLAMA_8B, "quantization_config": FP8_CHANNELS},
            {"runner": "V2", "enforce_eager": True},
            9179128320,
            id="fp8 with channel scales",
        ),
        pytest.param(
            {**QWEN25_7B, "quantization_config": AWQ},
            {"runner": "V2", "dtype": "float16"},
            5798493696,
            id="awq on hopper is repacked for Machete",
        ),
        pytest.param({**QWEN3_30B, "quantization_config": FP8_BLOCKS}, {}, 31186325504, id="fp8 experts in blocks"),
    ],
)
def test_weights_are_what_the_worker_measured(
    config: dict[str, Any], changes: dict[str, Any], expected_bytes: int
) -> None:
    assert weights(model(config), settings("0.26.0", **changes), H200).bytes == expected_bytes


def test_expandable_segments_waste_nothing() -> None:
    given = ServeArgs(env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    found = weights(model(LLAMA_8B), settings("0.26.0", runner="V2", given=given), H200)
    assert found.bytes == 16094142976


def test_lora_buffers_are_within_a_hundredth_of_a_mebibyte() -> None:
    given = ServeArgs(enable_lora=True, max_loras=4, max_lora_rank=16)
    found = weights(model(LLAMA_8B), settings("0.26.0", runner="V2", given=given), H200)
    assert abs(found.bytes - 16487826944) < 0.02 * MIB


def lora_bytes(config: dict[str, Any], release: str) -> int:
    given = ServeArgs(enable_lora=True, max_loras=1, max_lora_rank=64)
    plain, adapted = (settings(release, given=args) for args in (ServeArgs(), given))
    return weights(model(config), adapted, H200).bytes - weights(model(config), plain, H200).bytes


def test_a_family_without_adapters_for_its_embeddings_holds_buffers_for_its_layers_alone() -> None:
    a_layer = 2 * (2 * 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert lora_bytes(QWEN25_7B, "0.26.0") == pytest.approx(28 * a_layer * 64 * 2, abs=4 * MIB)


def test_qwen3_adapts_its_embeddings_from_0_16_on() -> None:
    table = 64 * 151936 * 2
    assert lora_bytes(QWEN3_30B, "0.16.0") - lora_bytes(QWEN3_30B, "0.15.0") == pytest.approx(2 * table, abs=4 * MIB)


def test_a_tied_head_of_qwen3_is_adapted_under_both_names_before_0_28() -> None:
    tied = QWEN3_30B | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    pair = 64 * (151936 + QWEN3_30B["hidden_size"]) * 2
    twice, once = lora_bytes(tied, "0.27.1"), lora_bytes(tied, "0.28.0")
    assert twice - once == pytest.approx(pair, abs=4 * MIB)


def test_adapters_of_tied_embeddings_are_an_estimate() -> None:
    given = ServeArgs(enable_lora=True, max_loras=1, max_lora_rank=64)
    kinds = [
        weights(model(LLAMA_8B | {"tie_word_embeddings": tied}), settings("0.26.0", given=given), H200).kind
        for tied in (False, True)
    ]
    assert kinds == ["exact", "estimated"]


def test_sliding_layers_of_olmo_3_have_a_rope_table_of_their_own() -> None:
    config = LLAMA_8B | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 4096}
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config |= {"max_position_embeddings": 65536, "rope_scaling": rope}
    terms = {term.label: term.bytes for term in weights(model(config), settings("0.11.2"), H200).terms}
    assert terms["rope cache"] == 2 * 65536 * 128 * 2


@pytest.mark.parametrize(("release", "has_table"), [("0.28.0", True), ("0.32.0", False)])
def test_families_that_run_on_the_transformers_library_have_no_rope_table(release: str, has_table: bool) -> None:
    config = LLAMA_8B | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
    terms = weights(model(config), settings(release), H200).terms
    assert ("rope cache" in {term.label for term in terms}) == has_table


@pytest.mark.parametrize(("release", "kind"), [("0.20.0", "estimated"), ("0.21.0", "exact")])
def test_rocm_took_all_that_the_card_lost_for_weights_until_0_21(release: str, kind: str) -> None:
    card = Gpu("AMD Instinct MI300X", 192 * 2**30, vendor="amd", compute_capability=(9, 4))
    assert weights(model(LLAMA_8B), settings(release), card).kind == kind


def test_gpt_oss_on_hopper_is_within_a_thousandth() -> None:
    found = weights(model(GPT_OSS_20B), settings("0.26.0"), H200)
    assert found.bytes == pytest.approx(13990115328, rel=0.001)
