"""How the activation peak behaves by release, runner and width."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import H200, models, settle

from legroom.facts.bundled import find
from legroom.facts.gpus import gpu
from legroom.facts.model import Modality
from legroom.facts.model_sources import from_bundled, load
from legroom.memory.activation.layer_peaks import expert_scratch
from legroom.memory.activation.profile_run import (
    activation,
    activation_cold,
    cublas_workspace,
    forward_bytes,
    is_compiled,
    sampling,
    scratch_rows,
)
from legroom.units import MIB
from legroom.vllm.args import ServeArgs

LLAMA = models()["t-llama-3.1-8b"]
QWEN_MOE = models()["t-qwen3-30b-a3b"]
GPT_OSS = models()["g-gptoss"]
EAGER = {"enforce_eager": True, "max_model_len": 8192}
BUNDLED_V4 = find("deepseek-v4-flash")
assert BUNDLED_V4
V4 = from_bundled(BUNDLED_V4)


def label(figure: object) -> list[str]:
    return [term.label for term in figure.terms]  # type: ignore[attr-defined]


def test_a_dense_peak_is_gate_up_product_two_hidden_states_and_the_attention_output() -> None:
    settings = settle(LLAMA, max_num_batched_tokens=8192, max_num_seqs=64)
    elements = 8192 * (3 * 14336 + 2 * 4096 + 4096)
    assert activation(LLAMA, settings, H200).bytes == elements * 2 + 32 * MIB


def test_terms_add_up_to_the_figure() -> None:
    for model in models().values():
        settings = settle(model, max_num_batched_tokens=2048, max_num_seqs=32)
        figure = activation(model, settings, H200)
        assert sum(term.bytes for term in figure.terms) == figure.bytes


@given(st.integers(1, 64), st.integers(1, 8))
def test_more_batched_tokens_never_need_less(thousands: int, more: int) -> None:
    few = settle(QWEN_MOE, max_num_batched_tokens=1024 * thousands, max_num_seqs=64)
    many = dataclasses.replace(few, max_num_batched_tokens=1024 * (thousands + more))
    assert activation(QWEN_MOE, many, H200).bytes > activation(QWEN_MOE, few, H200).bytes


@given(st.integers(8, 1024))
def test_more_sequences_never_need_less(sequences: int) -> None:
    few = settle(QWEN_MOE, max_num_batched_tokens=2048, max_num_seqs=sequences)
    many = dataclasses.replace(few, max_num_seqs=sequences + 1)
    assert activation(QWEN_MOE, many, H200).bytes >= activation(QWEN_MOE, few, H200).bytes


def test_tensor_parallel_ranks_share_the_feed_forward_block() -> None:
    one = settle(LLAMA, max_num_batched_tokens=8192, max_num_seqs=16)
    two = dataclasses.replace(one, tensor_parallel_size=2)
    assert activation(LLAMA, two, H200).bytes < 0.65 * activation(LLAMA, one, H200).bytes


def test_the_v2_runner_profiles_no_sampler() -> None:
    flags = {"max_num_batched_tokens": 2048, "max_num_seqs": 1024}
    v2 = settle(LLAMA, **flags)
    v1 = settle(LLAMA, env={"VLLM_USE_V2_MODEL_RUNNER": "0"}, **flags)
    assert (v2.runner, v1.runner) == ("V2", "V1")
    assert label(activation(LLAMA, v1, H200)) == ["logits and sampler"]
    assert activation(LLAMA, v1, H200).bytes > 4 * activation(LLAMA, v2, H200).bytes


def test_the_sampler_sorted_until_0_16_and_masks_since_0_17() -> None:
    flags = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
    sorting = sampling(LLAMA, settle(LLAMA, "0.16.0", **flags), H200)
    masking = sampling(LLAMA, settle(LLAMA, "0.17.0", **flags), H200)
    assert sorting.bytes == 38 * 1024 * LLAMA.vocab_size
    assert masking.bytes == 14 * 1024 * LLAMA.vocab_size + 132 * LLAMA.vocab_size * 4


def test_an_image_with_flashinfer_sampled_in_less_until_0_11_and_the_band_says_so() -> None:
    flags = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    unsure, sure = settle(LLAMA, "0.10.2", **flags), settle(LLAMA, "0.11.2", **flags)
    saved = 24 * 256 * LLAMA.vocab_size
    low, high = activation(LLAMA, unsure, H200), activation(LLAMA, sure, H200)
    assert low.bytes == high.bytes
    assert low.low < high.low - saved // 2


def test_the_environment_turns_flashinfers_sampler_on() -> None:
    flags = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    chosen = settle(LLAMA, "0.12.0", env={"VLLM_USE_FLASHINFER_SAMPLER": "1"}, **flags)
    assert sampling(LLAMA, chosen, H200).bytes == 14 * 256 * LLAMA.vocab_size


def test_speculative_tokens_double_the_sampler() -> None:
    flags = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
    plain = sampling(QWEN_MOE, settle(QWEN_MOE, **flags), H200)
    spec = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    drafting = sampling(QWEN_MOE, settle(QWEN_MOE, speculative_config=spec, **flags), H200)
    assert drafting.bytes - plain.bytes == 16 * 256 * QWEN_MOE.vocab_size


def test_every_token_got_logits_in_the_first_v1_releases() -> None:
    flags = {"max_num_batched_tokens": 4096, "max_num_seqs": 16, "max_model_len": 4096}
    settings = settle(LLAMA, "0.7.0", env={"VLLM_USE_V1": "1"}, **flags)
    assert settings.engine == "V1"
    assert sampling(LLAMA, settings, H200).bytes == 4096 * LLAMA.vocab_size * 2


def test_experts_keep_their_workspace_since_0_13() -> None:
    flags = {"max_num_batched_tokens": 8192, "max_num_seqs": 64}
    assert "experts' workspace" in label(activation(QWEN_MOE, settle(QWEN_MOE, "0.13.0", **flags), H200))
    assert "experts' workspace" not in label(activation(QWEN_MOE, settle(QWEN_MOE, "0.12.0", **flags), H200))


def test_mxfp4_experts_on_hopper_free_their_buffers_after_each_layer() -> None:
    settings = settle(GPT_OSS, max_num_batched_tokens=8192, max_num_seqs=16)
    assert "experts' workspace" not in label(activation(GPT_OSS, settings, H200))


def test_cublas_takes_more_on_hopper() -> None:
    assert cublas_workspace(H200) == 32 * MIB
    assert cublas_workspace(gpu("NVIDIA A100-SXM4-40GB")) < 9 * MIB


def test_the_top_k_scratch_has_a_row_a_program() -> None:
    assert scratch_rows(H200, 1024) == 132
    assert scratch_rows(H200, 16) == 16
    assert scratch_rows(H200, 100) == 128


def test_a_middle_pipeline_stage_does_not_sample() -> None:
    flags = {"max_num_batched_tokens": 2048, "max_num_seqs": 1024, "pipeline_parallel_size": 2}
    settings = settle(QWEN_MOE, **flags)
    assert activation(QWEN_MOE, settings, H200, 0).bytes < activation(QWEN_MOE, settings, H200, 1).bytes


def test_until_0_6_3_cached_blocks_were_charged_too() -> None:
    flags = {"max_num_batched_tokens": 8192, "max_model_len": 8192}
    before, since = (activation(LLAMA, settle(LLAMA, version, **flags), H200) for version in ("0.6.3", "0.6.4"))
    assert "reserved but unused" in label(before)
    assert before.bytes > 1.2 * since.bytes


def test_deep_gemm_pads_the_rows_of_every_expert() -> None:
    fp8 = models()["g-qwen30bfp8"]
    flags = {"max_num_batched_tokens": 8192, "max_num_seqs": 16}
    padded = activation(fp8, settle(fp8, **flags), H200)
    plain = activation(fp8, settle(fp8, env={"VLLM_USE_DEEP_GEMM": "0"}, **flags), H200)
    assert padded.bytes - plain.bytes == 128 * 127 * (2048 + 2048) * 2


def test_a_pooling_server_has_no_sampler() -> None:
    flags = {"max_num_batched_tokens": 2048, "max_num_seqs": 1024, "env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
    generating = activation(LLAMA, settle(LLAMA, **flags), H200)
    pooling = activation(LLAMA, settle(LLAMA, runner="pooling", **flags), H200)
    assert pooling.bytes < generating.bytes / 3


def test_encoder_outputs_wait_for_the_text_pass() -> None:
    image = Modality("image", 1024, 4096, 24, 16, 0, max_tokens_per_item=3025, patch_tokens_per_item=12100)
    seeing = dataclasses.replace(QWEN_MOE, modalities=(image,))
    flags = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
    blind = activation(QWEN_MOE, settle(QWEN_MOE, **flags), H200)
    figure = activation(seeing, settle(seeing, **flags), H200)
    assert figure.bytes - blind.bytes == 2 * 3025 * QWEN_MOE.hidden_size * 2
    skipped = settle(seeing, skip_mm_profiling=True, **flags)
    assert activation(seeing, skipped, H200).bytes == blind.bytes


def test_a_first_start_copies_no_embedding_that_is_looked_up_before_the_graph() -> None:
    qwen = load("qwen3.8-27b")
    for text_only in (False, True):
        settings = settle(qwen, "0.26.0", max_model_len=8192, max_num_seqs=16, language_model_only=text_only)
        assert (activation_cold(qwen, settings, H200).bytes > activation(qwen, settings, H200).bytes) is text_only


def test_tokens_of_all_data_parallel_ranks_are_gathered_before_the_experts() -> None:
    one = settle(QWEN_MOE, max_num_batched_tokens=8192, max_num_seqs=16)
    two = dataclasses.replace(one, data_parallel_size=2)
    assert activation(QWEN_MOE, two, H200).bytes > activation(QWEN_MOE, one, H200).bytes
    dense = settle(LLAMA, max_num_batched_tokens=8192, max_num_seqs=16)
    copies = dataclasses.replace(dense, data_parallel_size=2)
    assert activation(LLAMA, copies, H200).bytes == activation(LLAMA, dense, H200).bytes


def test_deepseek_v4_expands_no_latents_and_reserves_its_indexers_logits() -> None:
    settings = settle(V4, max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=131072, kv_cache_dtype="fp8")
    few, many = settings, dataclasses.replace(settings, max_num_seqs=256)
    assert forward_bytes(V4, few, H200) == forward_bytes(V4, many, H200)  # MLA's expansion is 256 tokens a sequence
    env = ServeArgs(env={"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "1512"})
    larger = dataclasses.replace(settings, given=env)
    assert forward_bytes(V4, larger, H200) - forward_bytes(V4, settings, H200) == 1000 * MIB


def test_a_sparse_indexer_reserves_the_keys_of_forty_requests() -> None:
    settings = settle(V4, max_num_batched_tokens=64, max_num_seqs=16, max_model_len=131072, kv_cache_dtype="fp8")
    assert expert_scratch(V4, settings, H200).kept_elements == 40 * (131072 // 4) * (128 + 4) // 2


def test_optimization_level_0_compiles_nothing() -> None:
    unoptimized = settle(LLAMA, max_model_len=8192, optimization_level=0)
    assert activation(LLAMA, unoptimized, H200).bytes == activation(LLAMA, settle(LLAMA, **EAGER), H200).bytes


def test_a_compilation_mode_of_null_is_the_default() -> None:
    assert is_compiled(settle(LLAMA, compilation_config={"mode": None}))


def test_an_unreadable_limit_of_the_indexers_logits_is_vllms_default() -> None:
    given, default = (
        settle(V4, kv_cache_dtype="fp8", env=env) for env in ({"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "512MB"}, {})
    )
    assert activation(V4, given, H200).bytes == activation(V4, default, H200).bytes
