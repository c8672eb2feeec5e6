from __future__ import annotations

from typing import Any

import pytest

from legroom.errors import LegroomError
from legroom.facts.config.feedforward import feedforwards
from legroom.facts.model import Dense, Experts

BASE: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 256}


def blocks(architecture: str = "", **changes: Any) -> tuple[Any, ...]:
    return feedforwards({**BASE, **changes}, architecture)


def test_a_llama_block_is_gated_without_bias() -> None:
    assert blocks() == (Dense(64, 256),) * 4


def test_older_families_have_no_gate_and_biases() -> None:
    assert blocks(model_type="gpt2", intermediate_size=None, n_inner=None)[0] == Dense(64, 256, gated=False, bias=True)
    assert blocks(model_type="phi")[0] == Dense(64, 256, gated=False, bias=True)


def test_the_first_layers_of_a_deepseek_are_dense() -> None:
    found = blocks(
        model_type="deepseek_v3",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
    )
    assert [type(one) for one in found] == [Dense, Experts, Experts, Experts]
    assert found[1] == Experts(64, 32, 8, 2, shared_intermediate_size=64, correction_bias=True)


def test_every_second_layer_of_a_maverick_has_experts() -> None:
    found = blocks(
        model_type="llama4_text",
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=512,
    )
    assert [type(one) for one in found] == [Dense, Experts, Dense, Experts]
    assert found[0].intermediate_size == 512
    assert found[1].shared_intermediate_size == 256


def test_a_pattern_of_letters_names_the_blocks_of_a_nemotron() -> None:
    found = blocks(
        model_type="nemotron_h",
        hybrid_override_pattern="M*E-",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_latent_size=16,
    )
    assert found[:2] == (None, None)
    assert isinstance(found[2], Experts)
    assert (found[2].latent_size, found[2].shared_intermediate_size, found[2].gated) == (16, 48, False)
    assert found[3] == Dense(64, 256, gated=False)


def test_gemma_4_has_a_dense_block_beside_its_experts() -> None:
    found = blocks(model_type="gemma4_text", num_experts=8, top_k_experts=2, moe_intermediate_size=32)
    assert found[0].parallel_dense == Dense(64, 256)
    assert found[0].intermediate_size == 32


def test_shared_layers_of_gemma_4_are_twice_as_wide_where_it_says_so() -> None:
    found = blocks(model_type="gemma4_text", use_double_wide_mlp=True, num_kv_shared_layers=1)
    assert [one.intermediate_size for one in found] == [256, 256, 256, 512]


def test_qwen_1_states_gate_and_up_together() -> None:
    assert blocks(model_type="qwen", intermediate_size=512)[0].intermediate_size == 256
    assert blocks(model_type="qwen", intermediate_size=176)[0].intermediate_size == 176


def test_a_mamba_has_no_feed_forward_block() -> None:
    assert blocks(model_type="mamba") == (None,) * 4


def test_the_width_of_an_expert_goes_by_the_name_that_hunyuan_3_gives_it() -> None:
    found = blocks(model_type="hy_v3", num_experts=8, num_experts_per_tok=2, expert_hidden_dim=32)
    assert found[0].intermediate_size == 32


def test_a_period_of_no_layers_is_an_error_for_people() -> None:
    with pytest.raises(LegroomError, match="expert_layer_period"):
        blocks(model_type="jamba", expert_layer_period=0)
