from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import GIB, H100, settings

from legroom.facts.config.model_config import model_from_config
from legroom.facts.model import Model
from legroom.facts.releases import release as known_release
from legroom.memory.kv.kv_plan import kv_plan
from legroom.memory.kv.shape import kv_shape
from legroom.vllm.args import ServeArgs

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
MODEL = model_from_config(LLAMA)
HYBRID = model_from_config(
    LLAMA
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
)
GEMMA = model_from_config(
    LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 1024}
)


def blocks(model: Model, **changes: Any) -> int:
    return kv_plan(model, settings(**changes), H100, [10 * GIB] * changes.get("pipeline_parallel_size", 1)).num_blocks


def test_a_block_of_llama_3_1_8b_takes_two_mib() -> None:
    plan = kv_plan(MODEL, settings(), H100, [10 * GIB])
    assert (plan.bytes_per_block, plan.bytes_per_token, plan.num_blocks) == (2 * 2**20, 128 * 2**10, 5120)
    assert plan.failure is None


def test_tensor_parallel_ranks_split_heads_until_each_has_one() -> None:
    assert [blocks(MODEL, tensor_parallel_size=tp) for tp in (1, 2, 4, 8, 16)] == [5120, 10240, 20480, 40960, 40960]


def test_the_largest_stage_decides_the_number_of_blocks() -> None:
    assert blocks(MODEL, pipeline_parallel_size=3) == 10 * GIB // (11 * 65_536)


def test_an_fp8_cache_holds_twice_as_much() -> None:
    assert blocks(MODEL, kv_cache_dtype="fp8") == 2 * blocks(MODEL)


def test_a_hybrid_block_holds_a_whole_state() -> None:
    plan = kv_plan(HYBRID, settings(), H100, [40 * GIB])
    assert (plan.block_size, plan.num_blocks) == (544, 3212)
    assert [group.spec.kind for group in plan.shape.groups] == ["state", "state", "state", "full"]


def test_sequences_beyond_the_state_blocks_fail_with_full_graphs() -> None:
    graphs = settings(cudagraph_mode="FULL_AND_PIECEWISE", enforce_eager=False, max_num_seqs=1024)
    plan = kv_plan(HYBRID, graphs, H100, [4 * GIB])
    assert plan.failure is not None
    assert plan.failure.id == "hybrid_state_cache_limit"
    assert f"lower max_num_seqs to at most {plan.num_blocks}" in plan.failure.message
    assert kv_plan(HYBRID, replace(graphs, max_num_seqs=plan.num_blocks), H100, [4 * GIB]).failure is None


def test_no_memory_means_no_blocks() -> None:
    for version in ("0.8.5", "0.17.1", "0.32.0"):
        failure = kv_plan(MODEL, settings(version), H100, [-GIB]).failure
        assert failure is not None
        assert failure.id == "no_cache_blocks"
        assert failure.message.startswith("No available memory for the cache blocks.")


def test_v0_compares_the_length_with_the_slots() -> None:
    old = settings("0.6.0", engine="V0", max_model_len=131_072)
    failure = kv_plan(MODEL, old, H100, [10 * GIB]).failure
    assert failure is not None
    assert "max seq len (131072) is larger than the maximum number of tokens" in failure.message
    assert "(81920)" in failure.message


def test_one_block_less_is_usable_from_0_29() -> None:
    exact = settings(max_model_len=8192)
    assert kv_plan(MODEL, replace(exact, release=known_release("0.28.0")), H100, [GIB]).failure is None
    assert kv_plan(MODEL, replace(exact, release=known_release("0.29.0")), H100, [GIB]).failure is not None


def test_a_fitted_length_passes_its_own_check() -> None:
    plan = kv_plan(MODEL, settings(max_model_len=131_072, auto_fit_len=True), H100, [5 * GIB])
    assert plan.max_model_len == 40_944
    assert plan.failure is None


def test_draft_layers_take_their_share_of_the_pool() -> None:
    drafted = model_from_config(LLAMA | {"num_nextn_predict_layers": 1})
    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    asked = settings(num_speculative_tokens=2, given=ServeArgs(speculative_config=speculative))
    assert kv_plan(drafted, asked, H100, [10 * GIB]).bytes_per_block == 33 * 65_536
    ngram = settings(num_speculative_tokens=2, given=ServeArgs(speculative_config={"method": "ngram"}))
    assert kv_plan(drafted, ngram, H100, [10 * GIB]).bytes_per_block == 32 * 65_536


def test_an_eagle_head_is_one_full_layer_more() -> None:
    speculative = {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 2}
    asked = settings(num_speculative_tokens=2, given=ServeArgs(speculative_config=speculative))
    groups = kv_plan(GEMMA, asked, H100, [10 * GIB]).shape.groups
    assert sum(len(group.layers) for group in groups if group.spec.kind == "full") == 6


def test_bidirectional_models_need_no_cache() -> None:
    bert = LLAMA | {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
    plan = kv_plan(model_from_config(bert), settings(max_model_len=512), H100, [GIB])
    assert (plan.num_blocks, plan.needed_bytes, plan.failure) == (0, 0, None)


def test_settings_that_differ_in_length_alone_share_a_shape() -> None:
    assert kv_shape(MODEL, settings(), H100) is kv_shape(MODEL, settings(max_model_len=1024), H100)
    assert kv_shape(MODEL, settings(), H100) is not kv_shape(MODEL, settings(tensor_parallel_size=2), H100)


RELEASES = st.sampled_from(["0.7.3", "0.8.5", "0.9.2", "0.11.0", "0.13.0", "0.16.0", "0.18.1", "0.26.0", "0.32.0"])


@given(st.sampled_from([MODEL, HYBRID, GEMMA]), RELEASES, st.integers(1, 131_072), st.integers(1, 80 * GIB))
def test_a_plan_fails_exactly_when_the_length_is_above_the_longest(
    model: Model, version: str, length: int, available: int
) -> None:
    plan = kv_plan(model, settings(version, max_model_len=length), H100, [available])
    assert (plan.failure is None) == (length <= plan.longest_len)


@given(st.sampled_from([MODEL, HYBRID, GEMMA]), RELEASES, st.integers(0, 80 * GIB), st.integers(0, GIB))
def test_more_memory_never_means_fewer_blocks(model: Model, version: str, available: int, more: int) -> None:
    asked = settings(version, max_model_len=1024)
    fewer, plenty = (kv_plan(model, asked, H100, [bytes_]) for bytes_ in (available, available + more))
    assert fewer.num_blocks <= plenty.num_blocks
    assert fewer.longest_len <= plenty.longest_len
    assert fewer.num_blocks * fewer.bytes_per_block <= available


@pytest.mark.parametrize("version", ["0.8.5", "0.32.0"])
def test_latent_attention_is_not_split_over_ranks(version: str) -> None:
    latent = LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512}
    model = model_from_config(latent | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})
    counts = {
        kv_plan(model, settings(version, tensor_parallel_size=tp), H100, [10 * GIB]).num_blocks for tp in (1, 2, 8)
    }
    assert len(counts) == 1
