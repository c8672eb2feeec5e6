from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import (
    A100,
    AWQ,
    DEEPSEEK_V2_LITE,
    FP8_BLOCKS,
    GIB,
    GPT_OSS_20B,
    H100,
    LLAMA_8B,
    QWEN3_30B,
    T4,
    model,
    settings,
)

from legroom.facts.anatomy import Anatomy
from legroom.facts.config.model_config import model_from_config
from legroom.facts.config.quantization import online_quantization, quantization
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.facts.releases import release as known_release
from legroom.memory.weights.loaded import parameter_bytes, weights
from legroom.memory.weights.module import Module
from legroom.memory.weights.quantized_modules import Schemes, patterns
from legroom.memory.weights.storage import StorageContext, storage
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve

LINEAR = Module("attention", "self_attn.o_proj", 4096, 2048, quantizable=True, whole_inputs=4096)
EXPERTS = Module("experts", "mlp.experts.w13", 384, 2048, copies=8, shards=("gate_proj", "up_proj"), quantizable=True)
ELEMENTS = 4096 * 2048
AMPERE = StorageContext("bfloat16", known_release("0.20.0"), (8, 0))
TURING = StorageContext("float16", known_release("0.20.0"), (7, 5))
HOPPER = StorageContext("bfloat16", known_release("0.20.0"), (9, 0))


def kept(section: dict[str, Any], context: StorageContext, module: Module = LINEAR) -> int:
    return sum(storage(module, quantization({"quantization_config": section}), context).kept)


def test_an_unquantized_module_takes_its_dtype_and_its_bias() -> None:
    biased = Module("attention", "x", 10, 20, bias=True)
    assert storage(biased, None, AMPERE).kept == (400, 20)


def test_awq_holds_weights_zero_points_and_scales() -> None:
    assert kept(AWQ, AMPERE) == ELEMENTS // 2 + ELEMENTS // 128 // 2 + ELEMENTS // 128 * 2


def test_machete_on_hopper_keeps_zero_points_in_sixteen_bits() -> None:
    assert kept(AWQ, HOPPER) == ELEMENTS // 2 + ELEMENTS // 128 * 2 + ELEMENTS // 128 * 2


def test_gptq_keeps_its_group_index_only_where_marlin_cannot_drop_it() -> None:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    scales, zeros, index = ELEMENTS // 128 * 2, ELEMENTS // 128 // 2, 2048 * 4
    assert kept(plain, AMPERE) == ELEMENTS // 2 + scales
    assert kept(plain, TURING) == ELEMENTS // 2 + scales + zeros + index


def test_machete_leaves_the_zero_points_of_symmetric_gptq_beside_what_it_repacked() -> None:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    zeros, index = ELEMENTS // 128 // 2, 4 * 2048
    assert kept(plain, HOPPER) == kept(plain, AMPERE) + zeros + index
    assert kept(plain, replace(HOPPER, release=known_release("0.32.0"))) == kept(plain, AMPERE) + zeros


def test_gptq_with_act_order_holds_the_scales_of_all_groups_and_two_indices() -> None:
    ordered = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
    assert kept(ordered, AMPERE) == ELEMENTS // 2 + 4096 * (4096 // 128) * 2 + 2 * 2048 * 4


def test_asking_for_awq_or_gptq_by_name_forbids_repacking() -> None:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    assert kept(AWQ, replace(HOPPER, quantization_flag="awq")) == kept(AWQ, AMPERE)
    assert kept(plain, replace(AMPERE, quantization_flag="gptq")) == kept(plain, TURING)


def test_fp8_blocks_have_a_float_each_and_a_half_for_every_output_on_ampere() -> None:
    assert kept(FP8_BLOCKS, HOPPER) == ELEMENTS + 32 * 16 * 4
    assert kept(FP8_BLOCKS, AMPERE) == ELEMENTS + 4096 * 16 * 2


def test_fp8_blocks_of_sliced_experts_shrink_to_what_divides_the_slice() -> None:
    assert kept(FP8_BLOCKS, HOPPER, EXPERTS) == 8 * (384 * 2048 + 2 * 3 * 32 * 4)


def test_nvfp4_is_half_a_byte_and_a_byte_for_sixteen() -> None:
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert kept(section, HOPPER) == ELEMENTS // 2 + ELEMENTS // 16 + 2 * 4


def test_bitsandbytes_scales_stayed_quantized_until_0_9_1() -> None:
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    old, new = (
        StorageContext("float16", known_release("0.9.1"), (7, 5)),
        StorageContext("float16", known_release("0.9.2"), (7, 5)),
    )
    assert kept(section, new) == ELEMENTS // 2 + ELEMENTS // 64 * 4
    assert kept(section, old) == ELEMENTS // 2 + ELEMENTS // 64 + ELEMENTS // 64 // 256 * 4


def test_bitsandbytes_that_loading_quantizes_is_stored_like_a_checkpoint_of_it() -> None:
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    old = StorageContext("float16", known_release("0.9.1"), (7, 5))
    assert sum(storage(LINEAR, online_quantization("bitsandbytes"), old).kept) == kept(section, old)


def test_quantizing_while_loading_leaves_a_byte_a_weight() -> None:
    scheme = online_quantization("fp8")
    assert sum(storage(LINEAR, scheme, HOPPER).kept) == ELEMENTS + 4


def test_gpt_oss_is_padded_by_the_kernel_of_the_gpu() -> None:
    gpt_oss = model(GPT_OSS_20B)
    # "Model loading took": 13.64 GiB on an H100 and 13.72 GiB on an A100, both 0.19.0.
    assert weights(gpt_oss, settings("0.19.0"), H100).bytes / GIB == pytest.approx(13.64, rel=0.002)
    assert weights(gpt_oss, settings("0.19.0"), A100).bytes / GIB == pytest.approx(13.72, rel=0.002)
    two = settings("0.19.0", tensor_parallel_size=2)
    assert weights(gpt_oss, two, H100).bytes / GIB == pytest.approx(7.01, rel=0.002)


def test_embeddings_and_output_layer_stay_as_they_are() -> None:
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized = weights(model(LLAMA_8B, quantization_config=section), settings("0.19.0"), T4)
    tables = {term.label: term.bytes for term in quantized.terms}
    assert tables["embeddings"] == tables["lm_head"] == 128256 * 4096 * 2


def test_ignored_modules_are_matched_by_name_glob_and_expression() -> None:
    found = patterns(("lm_head", "model.layers.3.mlp.gate", "language_model.layers.1*", "re:.*shared_experts.*"))
    assert found.match("lm_head")
    assert found.match("layers.3.mlp.gate")
    assert not found.match("layers.3.mlp.gate_proj")
    assert not found.match("layers.2.self_attn.q_proj")
    assert found.match("layers.2.mlp.shared_experts.up_proj")


@given(
    st.lists(
        st.sampled_from(
            (
                "model.layers.1.self_attn.q_proj",
                "model.layers.12.mlp",
                "model.layers.1*",
                "model.layers.3.self_attn*",
                "language_model.model.layers.104.*",
                "re:.*self_attn.*",
                "re:model.layers..\\.mlp.*",
                "*.layers.?.mlp*",
                "11",
                "re:.*layers\\.[0-4]\\.mlp.*",
                "re:.*_pr[o]j$",
                "mtp*",
                "3.mlp",
                "*shared*",
                "re:.*layers\\.(2|33)\\..*",
            )
        ),
        max_size=3,
    )
)
def test_layers_that_patterns_cannot_tell_apart_share_what_was_looked_up_for_one(names: list[str]) -> None:
    scheme = quantization({"quantization_config": {**FP8_BLOCKS, "modules_to_not_convert": names}})
    shared = Schemes(scheme, Anatomy())
    for layer in (0, 1, 2, 3, 5, 9, 10, 11, 12, 20, 33, 40, 100, 104, 110):
        for module in (LINEAR, EXPERTS):
            assert shared.of(module, layer) == Schemes(scheme, Anatomy()).of(module, layer)


def test_a_fused_module_is_ignored_when_one_of_its_parts_is() -> None:
    ignoring = {**FP8_BLOCKS, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    schemes = Schemes(quantization({"quantization_config": ignoring}), Anatomy())
    fused = Module("attention", "self_attn.qkv_proj", 64, 64, shards=("q_proj", "k_proj", "v_proj"), quantizable=True)
    assert schemes.of(fused, 0) is None
    assert schemes.of(fused, 1) is not None


def test_experts_are_found_under_the_path_of_their_family() -> None:
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.0.mlp*"]}
    scheme = quantization({"quantization_config": section})
    assert Schemes(scheme, Anatomy()).of(EXPERTS, 0) is None
    assert Schemes(scheme, Anatomy(moe_path="")).of(EXPERTS, 0) is not None


def test_mixed_precision_gives_each_module_its_own_scheme() -> None:
    section = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4"},
        },
    }
    schemes = Schemes(quantization({"quantization_config": section}), Anatomy())
    down = Module("feed-forward", "mlp.down_proj", 64, 64, quantizable=True)
    bits = [
        scheme and scheme.weight_bits for scheme in (schemes.of(LINEAR, 0), schemes.of(down, 0), schemes.of(down, 1))
    ]
    assert bits == [8, 4, None]


def test_the_recurrent_layers_of_nemotron_in_nvfp4_have_8_bits() -> None:
    # Its publisher gives 331 GB for the checkpoint, in which nothing but the routed experts has 4 bits.
    held = parameter_bytes(load("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4"), settings(), H100)
    assert held == pytest.approx(331e9, rel=0.01)


def test_a_router_is_never_quantized() -> None:
    plain = parameter_bytes(model(QWEN3_30B), settings(), H100)
    eight = parameter_bytes(model(QWEN3_30B, quantization_config=FP8_BLOCKS), settings(), H100)
    router = 48 * 128 * 2048 * 2
    assert eight > plain // 2 + router // 2


def test_a_quantized_latent_projection_is_kept_a_second_time_in_sixteen_bits() -> None:
    plain = parameter_bytes(model(DEEPSEEK_V2_LITE), settings(), H100)
    quantized = parameter_bytes(model(DEEPSEEK_V2_LITE, quantization_config=FP8_BLOCKS), settings(), H100)
    ignoring = {**FP8_BLOCKS, "modules_to_not_convert": [f"model.layers.{i}.self_attn.kv_b_proj" for i in range(27)]}
    without = parameter_bytes(model(DEEPSEEK_V2_LITE, quantization_config=ignoring), settings(), H100)
    matrix = 27 * 4096 * 512
    assert quantized - without == matrix + 27 * 32 * 4 * 4
    assert plain > without


def test_a_flag_that_contradicts_the_config_is_believed_where_it_says_how_weights_are_stored():
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}

    def loaded(config: dict[str, Any], **flags: Any) -> int:
        one = model_from_config(config, "m")
        return weights(one, resolve(ServeArgs(**flags), one, H100, release("0.26.0")), H100).bytes

    stated = loaded(LLAMA_8B | {"quantization_config": nvfp4})
    contradicted = loaded(LLAMA_8B | {"quantization_config": nvfp4}, quantization="fp8")
    assert stated < contradicted == loaded(LLAMA_8B, quantization="fp8")
