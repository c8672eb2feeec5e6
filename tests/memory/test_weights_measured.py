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


def test_gpt_oss_on_hopper_is_within_a_thousandth() -> None:
    found = weights(model(GPT_OSS_20B), settings("0.26.0"), H200)
    assert found.bytes == pytest.approx(13990115328, rel=0.001)
