from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import DEEPSEEK_V2_LITE, GIB, H100, LLAMA_8B, QWEN3_30B, model, settings

from legroom.errors import LegroomError
from legroom.memory.weights.loaded import parameter_bytes, weights
from legroom.vllm.args import ServeArgs, redundant_experts

TINY = {
    **LLAMA_8B,
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}


def term(found: object, label: str) -> int:
    return next((one.bytes for one in found.terms if one.label == label), 0)  # type: ignore[attr-defined]


def test_kv_heads_are_repeated_when_there_are_fewer_than_ranks() -> None:
    one, eight = (parameter_bytes(model(TINY), settings(tensor_parallel_size=tp), H100) for tp in (2, 8))
    queries, keys_and_values, output = 8 * 64, 2 * 64, 8 * 64
    tables, feedforward, norms = 2 * 1024 * 512, 4 * 3 * 512 * 1024, 9 * 512
    per_layer = 512 * (queries // 8 + keys_and_values + output // 8)
    assert eight == 2 * (tables // 8 + feedforward // 8 + 4 * per_layer + norms)
    assert one > eight


def test_the_vocabulary_is_padded_to_64_rows() -> None:
    found = weights(model(TINY), settings(), H100)
    assert term(found, "embeddings") == 1024 * 512 * 2


def test_tied_embeddings_are_held_once_on_one_stage_and_on_both_ends_of_two() -> None:
    tied = model(TINY, tie_word_embeddings=True)
    assert term(weights(tied, settings(), H100), "lm_head") == 0
    first, last = (weights(tied, settings(pipeline_parallel_size=2), H100, stage) for stage in (0, 1))
    assert term(first, "embeddings") == term(last, "embeddings") == 1024 * 512 * 2


def test_layers_left_over_go_before_the_last_stage_since_0_8_and_to_it_before() -> None:
    odd = model(TINY, num_hidden_layers=5)
    new = [parameter_bytes(odd, settings("0.8.0", pipeline_parallel_size=2), H100, stage) for stage in (0, 1)]
    old = [parameter_bytes(odd, settings("0.7.3", pipeline_parallel_size=2), H100, stage) for stage in (0, 1)]
    assert new[0] > new[1]
    assert old[0] < old[1]


def test_a_written_partition_is_followed() -> None:
    partition = ServeArgs(env={"VLLM_PP_LAYER_PARTITION": "1,3"})
    chosen = settings(pipeline_parallel_size=2, given=partition)
    first, last = (weights(model(TINY), chosen, H100, stage) for stage in (0, 1))
    assert term(last, "feed-forward") == 3 * term(first, "feed-forward")


def test_expert_parallelism_spreads_whole_experts_over_tensor_and_data_ranks() -> None:
    sliced = weights(model(QWEN3_30B), settings(tensor_parallel_size=4), H100)
    spread = weights(model(QWEN3_30B), settings(tensor_parallel_size=4, enable_expert_parallel=True), H100)
    wide = settings(tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True)
    assert term(sliced, "experts") == term(spread, "experts")
    assert term(weights(model(QWEN3_30B), wide, H100), "experts") * 2 == term(spread, "experts")


def test_data_parallel_ranks_share_the_experts_also_in_slices() -> None:
    alone, shared = (weights(model(QWEN3_30B), settings(data_parallel_size=ranks), H100) for ranks in (1, 2))
    assert term(alone, "experts") == 2 * term(shared, "experts")
    assert term(alone, "attention") == term(shared, "attention") > 0


def test_dense_data_parallel_ranks_hold_all_weights_each() -> None:
    assert parameter_bytes(model(TINY), settings(data_parallel_size=2), H100) == parameter_bytes(
        model(TINY), settings(), H100
    )


def test_experts_that_do_not_divide_over_all_ranks_are_refused_with_a_hint() -> None:
    with pytest.raises(LegroomError, match="expert width 768 does not divide over 10 GPUs"):
        weights(model(QWEN3_30B), settings(tensor_parallel_size=2, data_parallel_size=5), H100)


def test_latent_down_projections_are_whole_on_every_rank() -> None:
    one, four = (parameter_bytes(model(DEEPSEEK_V2_LITE), settings(tensor_parallel_size=tp), H100) for tp in (1, 4))
    whole = 27 * 576 * 2048 + 26 * 64 * 2048 + 27 * (2 * 2048 + 512) + 2048
    assert four * 4 - one == 3 * whole * 2


def test_heads_that_do_not_divide_are_refused_with_a_hint() -> None:
    with pytest.raises(LegroomError, match="attention heads 32 does not divide"):
        weights(model(LLAMA_8B), settings(tensor_parallel_size=3), H100)


def test_cpu_offload_takes_whole_parameters_until_the_limit_is_passed() -> None:
    full = weights(model(LLAMA_8B), settings("0.17.1"), H100)
    rest = weights(model(LLAMA_8B), settings("0.17.1", given=ServeArgs(cpu_offload_gb=12)), H100)
    # "Model loading took 2.91 GiB" on an RTX 3090 with --cpu-offload-gb 12.
    assert rest.bytes / GIB == pytest.approx(2.91, abs=0.006)
    assert full.bytes - rest.bytes >= 12 * GIB


def test_the_terms_add_up_to_the_figure() -> None:
    found = weights(model(QWEN3_30B), settings(tensor_parallel_size=2), H100)
    assert sum(one.bytes for one in found.terms) == found.bytes


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(64, 4000))
def test_stages_and_ranks_hold_at_least_the_whole_model(tp: int, pp: int, vocab: int) -> None:
    whole = parameter_bytes(model(TINY, vocab_size=vocab), settings(), H100)
    chosen = settings(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    parts = [parameter_bytes(model(TINY, vocab_size=vocab), chosen, H100, stage) for stage in range(pp)]
    assert sum(parts) * tp >= whole


def test_an_unknown_architecture_is_scaled_to_the_size_of_its_files() -> None:
    stranger = replace(model(TINY), known=False)
    whole = parameter_bytes(stranger, settings(), H100)
    heavier = replace(stranger, checkpoint_bytes=int(whole * 1.5))
    plain, scaled = (weights(one, settings(tensor_parallel_size=2), H100) for one in (stranger, heavier))
    assert scaled.bytes == pytest.approx(plain.bytes * 1.5, rel=1e-6)
    assert scaled.kind == "estimated"
    assert sum(one.bytes for one in scaled.terms) == scaled.bytes


def test_the_files_of_a_known_architecture_change_nothing() -> None:
    known = model(TINY)
    assert weights(replace(known, checkpoint_bytes=1), settings(), H100).bytes == weights(known, settings(), H100).bytes


def test_redundant_experts_are_copies_on_every_rank() -> None:
    spread = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    balanced = ServeArgs(others=("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 8}'))
    plain, more = (
        parameter_bytes(model(QWEN3_30B), settings(**spread, given=given), H100) for given in (ServeArgs(), balanced)
    )
    expert = 3 * QWEN3_30B["hidden_size"] * QWEN3_30B["moe_intermediate_size"] * 2
    assert more - plain == QWEN3_30B["num_hidden_layers"] * 8 // 4 * expert


def test_a_flag_of_its_own_asks_for_redundant_experts_up_to_0_11() -> None:
    asked = ("--enable-eplb", "--num-redundant-experts", "8")
    assert redundant_experts(ServeArgs(others=asked)) == 8
    assert redundant_experts(ServeArgs(others=asked[1:])) == 0
