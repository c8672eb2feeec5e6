from __future__ import annotations

from typing import Any

import pytest

from legroom.errors import LegroomError
from legroom.facts.config.quantization import online_quantization, quantization
from legroom.facts.model import Quantization


def read(**section: Any) -> Quantization:
    found = quantization({"quantization_config": section})
    assert found is not None
    return found


def test_a_plain_checkpoint_has_none() -> None:
    assert quantization({"hidden_size": 64}) is None
    assert quantization({"quantization_config": {}}) is None


def test_the_section_may_sit_in_the_text_config() -> None:
    nested = {"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}}
    found = quantization(nested)
    assert found is not None
    assert (found.method, found.group_size) == ("awq", 64)


def test_awq_and_gptq_speak_of_groups_and_zero_points() -> None:
    assert read(quant_method="awq", bits=4, group_size=128, zero_point=True).zero_point
    gptq = read(quant_method="gptq", bits=4, group_size=-1, desc_act=True, sym=False)
    assert (gptq.group_size, gptq.act_order, gptq.zero_point) == (None, True, True)


def test_gptq_rules_skip_and_override_modules() -> None:
    found = read(quant_method="gptq", bits=4, group_size=128, dynamic={"-:.*router.*": {}, "+:.*down.*": {"bits": 8}})
    assert found.ignored == ("re:.*router.*",)
    assert [(name, scheme.weight_bits) for name, scheme in found.rules] == [("re:.*down.*", 8)]


def test_fp8_has_blocks_or_a_scale_a_tensor() -> None:
    assert read(quant_method="fp8", weight_block_size=[128, 128]).block == (128, 128)
    static = read(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"])
    assert (static.strategy, static.static_activations, static.ignored) == ("tensor", True, ("lm_head",))


def test_compressed_tensors_groups_become_schemes() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    found = read(quant_method="compressed-tensors", config_groups={"group_0": group}, ignore=["re:.*self_attn.*"])
    assert (found.weight_bits, found.group_size, found.ignored) == (4, 32, ("re:.*self_attn.*",))
    eight = {"targets": ["re:.*o_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    mixed = read(quant_method="compressed-tensors", config_groups={"a": eight, "b": group})
    assert [(name, scheme.weight_bits) for name, scheme in mixed.rules] == [("re:.*o_proj", 8), ("Linear", 4)]


def test_modelopt_is_read_from_its_algorithm_with_or_without_a_method() -> None:
    found = read(quant_algo="NVFP4", exclude_modules=["lm_head"], kv_cache_quant_algo="FP8")
    assert (found.method, found.weight_bits, found.group_size, found.kv_cache_dtype) == ("modelopt_fp4", 4, 16, "fp8")
    assert read(quant_method="modelopt", quant_algo="FP8").static_activations


def test_mixed_precision_without_a_list_is_what_such_checkpoints_usually_are() -> None:
    found = read(quant_method="modelopt", quant_algo="MIXED_PRECISION")
    assert {scheme.weight_bits for _, scheme in found.rules} == {4, 8}


def test_bitsandbytes_needs_no_method_name() -> None:
    assert read(load_in_4bit=True, llm_int8_skip_modules=["lm_head"]).ignored == ("lm_head",)


def test_an_unknown_method_is_named_with_those_that_are_known() -> None:
    with pytest.raises(LegroomError, match="'mystery' is not known") as caught:
        read(quant_method="mystery")
    assert "awq" in caught.value.hint


def test_only_some_methods_quantize_while_loading() -> None:
    online = online_quantization("fp8")
    assert online is not None
    assert online.online
    assert online_quantization("awq") is None


@pytest.mark.parametrize(
    "section",
    [{"quant_method": "awq", "bits": 4, "group_size": 128}, {"quant_method": "gptq", "bits": 4, "group_size": 128}],
)
def test_a_4_bit_hybrid_with_experts_without_a_list_keeps_linear_attention_at_16_bits(
    section: dict[str, object],
) -> None:
    dense = quantization({"linear_num_value_heads": 32, "quantization_config": section})
    hybrid = quantization({"linear_num_value_heads": 32, "num_experts": 256, "quantization_config": section})
    plain = quantization({"quantization_config": section})
    listed = {**section, "modules_to_not_convert": ["visual"]}
    own = quantization({"linear_num_value_heads": 32, "quantization_config": listed})
    assert dense is not None
    assert hybrid is not None
    assert plain is not None
    assert (dense.ignored, dense.list_assumed) == ((), True)
    assert own is not None
    assert (hybrid.ignored, hybrid.list_assumed) == (("re:.*linear_attn.*",), True)
    assert (plain.ignored, plain.list_assumed) == ((), False)
    assert (own.ignored, own.list_assumed) == (("visual",), False)
