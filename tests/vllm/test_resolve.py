"""Defaults as each release fills them in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_vllm_models import (
    A10,
    A100,
    B200,
    BERT,
    CHUNKED,
    H100,
    HYBRID,
    LLAMA,
    MAMBA,
    MI300,
    MOE,
    SHORT,
    SPARSE,
    T4,
    VISION,
    WHISPER,
)

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model, Quantization
from legroom.facts.releases import known_releases, release
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve
from legroom.vllm.setting_checks import RefusedByVllm


def settle(version: str, model: Model = LLAMA, gpu: Gpu = H100, **given_args: Any) -> EngineSettings:
    return resolve(ServeArgs(model="m", **given_args), model, gpu, release(version))


@pytest.mark.parametrize(
    ("version", "gpu", "usage", "tokens", "seqs"),
    [
        ("0.8.0", H100, "serve", 8192, 1024),
        ("0.8.0", A10, "serve", 2048, 1024),
        ("0.8.4", A100, "serve", 2048, 256),
        ("0.8.5", A100, "serve", 8192, 1024),
        ("0.9.0", A100, "serve", 2048, 256),
        ("0.11.0", H100, "llm", 16384, 1024),
        ("0.11.0", A10, "llm", 8192, 256),
        ("0.27.1", B200, "serve", 8192, 1024),
        ("0.28.0", B200, "serve", 16384, 1024),
        ("0.32.0", H100, "serve", 8192, 1024),
        ("0.32.0", MI300, "serve", 16384, 1024),
    ],
)
def test_a_step_starts_from_the_cards_defaults(version: str, gpu: Gpu, usage: Any, tokens: int, seqs: int) -> None:
    found = settle(version, LLAMA, gpu, usage=usage)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("version", "given_args", "mode"),
    [
        ("0.32.0", {}, "FULL_AND_PIECEWISE"),
        ("0.32.0", {"others": ("--enable-sleep-mode",)}, "NONE"),
        ("0.28.0", {}, "NONE"),
        ("0.28.0", {"env": {"VLLM_XPU_ENABLE_XPU_GRAPH": "1"}}, "FULL_AND_PIECEWISE"),
        ("0.16.0", {}, "NONE"),
    ],
)
def test_intel_cards_capture_graphs_from_0_31_on(version: str, given_args: dict[str, Any], mode: str) -> None:
    card = Gpu("Intel Arc Pro B60", 24 * 2**30, vendor="intel")
    assert settle(version, gpu=card, **given_args).cudagraph_mode == mode


@pytest.mark.parametrize(
    ("version", "model", "tokens", "chunked"),
    [
        ("0.4.0", SHORT, 8192, False),
        ("0.5.2", LLAMA, 131072, False),
        ("0.5.3", LLAMA, 512, True),
        ("0.6.4", LLAMA, 512, True),
        ("0.6.5", LLAMA, 2048, True),
        ("0.7.3", SHORT, 8192, False),
        ("0.7.3", VISION, 8192, False),
        ("0.6.3", BERT, 32768, False),
    ],
)
def test_the_v0_engine_splits_long_prompts_only(version: str, model: Model, tokens: int, chunked: bool) -> None:
    found = settle(version, model)
    assert (found.engine, found.max_num_batched_tokens, found.enable_chunked_prefill) == ("V0", tokens, chunked)


@pytest.mark.parametrize(
    ("version", "given_args", "tokens", "seqs"),
    [
        ("0.10.0", {"max_num_seqs": 2000}, 8192, 2000),
        ("0.10.1", {"max_num_batched_tokens": 100}, 100, 100),
        ("0.32.0", {"performance_mode": "throughput"}, 16384, 2048),
        ("0.32.0", {"max_num_seqs": 3, "max_model_len": 100}, 300, 3),
        ("0.32.0", {"enable_chunked_prefill": False, "max_model_len": 32768}, 32768, 1024),
        ("0.32.0", {"enable_chunked_prefill": False, "max_model_len": 4096}, 8192, 1024),
        ("0.11.0", {"enable_chunked_prefill": False}, 8192, 1024),
    ],
)
def test_open_values_follow_the_given_ones(version: str, given_args: dict[str, Any], tokens: int, seqs: int) -> None:
    found = settle(version, **given_args)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("version", "given_args", "model", "gpu", "engine"),
    [
        ("0.4.0", {}, LLAMA, H100, "V0"),
        ("0.7.3", {"env": {"VLLM_USE_V1": "1"}}, LLAMA, H100, "V1"),
        ("0.6.3", {"env": {"VLLM_USE_V1": "1"}}, LLAMA, H100, "V0"),
        ("0.8.0", {}, LLAMA, H100, "V1"),
        ("0.8.0", {"env": {"VLLM_USE_V1": "0"}}, LLAMA, H100, "V0"),
        ("0.8.0", {"kv_cache_dtype": "fp8"}, LLAMA, H100, "V0"),
        ("0.9.0", {"kv_cache_dtype": "fp8"}, LLAMA, H100, "V1"),
        ("0.9.0", {"kv_cache_dtype": "fp8"}, LLAMA, A10, "V0"),
        ("0.8.5", {"dtype": "half"}, LLAMA, T4, "V0"),
        ("0.10.2", {}, LLAMA, T4, "V1"),
        ("0.8.5", {}, LLAMA, MI300, "V0"),
        ("0.9.2", {}, LLAMA, MI300, "V1"),
        ("0.9.0", {"others": ("--num-scheduler-steps", "8")}, LLAMA, H100, "V0"),
        ("0.9.0", {"others": ("--num-scheduler-steps", "1")}, LLAMA, H100, "V1"),
        ("0.9.1", {}, BERT, H100, "V0"),
        ("0.10.1", {}, HYBRID, H100, "V0"),
        ("0.10.2", {}, HYBRID, H100, "V1"),
        ("0.8.1", {"enable_lora": True}, LLAMA, H100, "V0"),
        ("0.8.3", {"enable_lora": True}, LLAMA, H100, "V1"),
        ("0.8.5", {"pipeline_parallel_size": 2}, LLAMA, H100, "V0"),
        (
            "0.8.5",
            {"pipeline_parallel_size": 2, "others": ("--distributed-executor-backend", "ray")},
            LLAMA,
            H100,
            "V1",
        ),
        ("0.9.0", {"pipeline_parallel_size": 2}, LLAMA, H100, "V0"),
        ("0.9.1", {"pipeline_parallel_size": 2}, LLAMA, H100, "V1"),
        ("0.9.1", {}, LLAMA, MI300, "V0"),
        ("0.9.0", {"speculative_config": {"method": "eagle"}}, LLAMA, H100, "V1"),
        ("0.9.0", {"speculative_config": {"model": "d"}}, LLAMA, H100, "V0"),
        ("0.11.0", {"env": {"VLLM_USE_V1": "0"}}, LLAMA, H100, "V1"),
    ],
)
def test_the_engine_generation_and_its_fallbacks(
    version: str, given_args: dict[str, Any], model: Model, gpu: Gpu, engine: str
) -> None:
    assert settle(version, model, gpu, **given_args).engine == engine


def test_a_fallback_says_why() -> None:
    assert "--kv-cache-dtype fp8" in settle("0.8.0", kv_cache_dtype="fp8").notes[0]


@pytest.mark.parametrize(
    ("version", "model", "runner"),
    [
        ("0.21.0", LLAMA, "V1"),
        ("0.22.0", LLAMA, "V1"),
        ("0.23.0", LLAMA, "V2"),
        ("0.26.0", MOE, "V1"),
        ("0.26.0", HYBRID, "V1"),
        ("0.28.0", SPARSE, "V2"),
        ("0.29.0", MOE, "V2"),
        ("0.29.0", HYBRID, "V2"),
    ],
)
def test_the_model_runner_moves_to_v2(version: str, model: Model, runner: str) -> None:
    assert settle(version, model).runner == runner


def test_the_environment_picks_the_model_runner() -> None:
    assert settle("0.32.0", env={"VLLM_USE_V2_MODEL_RUNNER": "0"}).runner == "V1"
    assert settle("0.26.0", MOE, env={"VLLM_USE_V2_MODEL_RUNNER": "1"}).runner == "V2"


@pytest.mark.parametrize(
    ("version", "given_args", "mode", "count", "largest"),
    [
        ("0.5.0", {}, "FULL_DECODE_ONLY", 35, 256),
        ("0.7.3", {"max_num_seqs": 10}, "FULL_DECODE_ONLY", 5, 16),
        ("0.8.0", {}, "PIECEWISE", 67, 512),
        ("0.10.0", {"max_num_seqs": 16}, "PIECEWISE", 7, 32),
        ("0.11.0", {}, "FULL_AND_PIECEWISE", 67, 512),
        ("0.11.1", {}, "FULL_AND_PIECEWISE", 51, 512),
        ("0.11.0", {"others": ("--cuda-graph-sizes", "8", "4")}, "FULL_AND_PIECEWISE", 2, 8),
        ("0.11.0", {"others": ("--cuda-graph-sizes", "64")}, "FULL_AND_PIECEWISE", 11, 64),
        ("0.11.0", {"compilation_config": {"level": 0}}, "NONE", 0, 0),
        ("0.10.2", {"compilation_config": {"full_cuda_graph": True}}, "FULL", 67, 512),
        ("0.32.0", {"optimization_level": 0}, "NONE", 0, 0),
        ("0.32.0", {"optimization_level": 1}, "PIECEWISE", 51, 512),
        ("0.32.0", {"enforce_eager": True}, "NONE", 0, 0),
        ("0.32.0", {"cudagraph_capture_sizes": (4, 1, 4)}, "FULL_AND_PIECEWISE", 2, 4),
        ("0.32.0", {"max_num_batched_tokens": 37}, "FULL_AND_PIECEWISE", 8, 37),
        ("0.32.0", {"max_num_seqs": 100}, "FULL_AND_PIECEWISE", 29, 200),
    ],
)
def test_graphs_are_captured_as_the_release_does(
    version: str, given_args: dict[str, Any], mode: str, count: int, largest: int
) -> None:
    found = settle(version, **given_args)
    sizes = found.cudagraph_capture_sizes
    assert (found.cudagraph_mode, len(sizes), max(sizes, default=0)) == (mode, count, largest)


@pytest.mark.parametrize(
    ("version", "gpu", "given_args", "applied"),
    [
        ("0.17.1", H100, {}, False),
        ("0.19.0", H100, {}, False),
        ("0.19.0", H100, {"env": {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "1"}}, True),
        ("0.20.0", H100, {}, True),
        ("0.20.0", H100, {"env": {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}}, False),
        ("0.20.0", H100, {"enforce_eager": True}, False),
        ("0.21.0", MI300, {}, False),
        ("0.26.0", H100, {}, False),
        ("0.26.0", H100, {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, True),
        ("0.29.0", H100, {}, True),
    ],
)
def test_graphs_are_counted_in_the_budget_or_not(
    version: str, gpu: Gpu, given_args: dict[str, Any], applied: bool
) -> None:
    assert settle(version, LLAMA, gpu, **given_args).graph_estimate_applied is applied


@pytest.mark.parametrize(
    ("version", "given_args", "batches"),
    [
        ("0.13.0", {}, 1),
        ("0.14.0", {}, 2),
        ("0.32.0", {"async_scheduling": False}, 1),
        ("0.32.0", {"pipeline_parallel_size": 2}, 3),
        ("0.32.0", {"pipeline_parallel_size": 2, "env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, 2),
        ("0.32.0", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, 1),
        ("0.10.2", {"async_scheduling": True}, 2),
    ],
)
def test_batches_in_flight(version: str, given_args: dict[str, Any], batches: int) -> None:
    assert settle(version, **given_args).max_concurrent_batches == batches


@pytest.mark.parametrize(
    ("version", "model", "cached"),
    [
        ("0.7.3", SHORT, False),
        ("0.9.0", LLAMA, True),
        ("0.25.1", HYBRID, False),
        ("0.26.0", HYBRID, False),
        ("0.27.1", HYBRID, False),
        ("0.28.0", HYBRID, True),
        ("0.32.0", MAMBA, False),
        ("0.32.0", WHISPER, False),
        ("0.32.0", BERT, False),
    ],
)
def test_prefixes_are_cached_where_the_release_can(version: str, model: Model, cached: bool) -> None:
    assert settle(version, model).enable_prefix_caching is cached


@pytest.mark.parametrize(
    ("version", "given_args", "off"),
    [
        ("0.9.0", {}, True),
        ("0.10.0", {}, False),
        ("0.10.1", {}, True),
        ("0.14.0", {}, False),
        ("0.14.0", {"speculative_config": {"method": "eagle"}}, True),
        ("0.14.0", {"disable_hybrid_kv_cache_manager": True}, True),
        ("0.14.0", {"others": ("--kv-transfer-config", "{}")}, True),
    ],
)
def test_the_hybrid_manager_is_off_where_the_release_turns_it_off(
    version: str, given_args: dict[str, Any], off: bool
) -> None:
    assert settle(version, CHUNKED, **given_args).disable_hybrid_kv_cache_manager is off


def with_quantization(method: str, kv_cache_dtype: str) -> Model:
    return replace(LLAMA, quantization=Quantization(method, 8, kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize(
    ("version", "model", "gpu", "asked", "dtype"),
    [
        ("0.32.0", LLAMA, H100, None, "auto"),
        ("0.32.0", LLAMA, H100, "fp8", "fp8"),
        ("0.11.0", with_quantization("modelopt", "fp8"), H100, None, "auto"),
        ("0.14.0", with_quantization("modelopt", "fp8"), H100, None, "fp8"),
        ("0.14.0", with_quantization("compressed-tensors", "fp8"), H100, None, "auto"),
        ("0.15.0", with_quantization("compressed-tensors", "fp8"), H100, None, "fp8"),
        ("0.32.0", with_quantization("modelopt", "fp8"), H100, "bfloat16", "bfloat16"),
        ("0.11.0", SPARSE, H100, None, "fp8_ds_mla"),
        ("0.32.0", SPARSE, H100, None, "auto"),
        ("0.32.0", SPARSE, H100, "fp8", "fp8_ds_mla"),
        ("0.32.0", SPARSE, B200, "fp8", "fp8"),
    ],
)
def test_the_cache_precision(version: str, model: Model, gpu: Gpu, asked: str | None, dtype: str) -> None:
    assert settle(version, model, gpu, kv_cache_dtype=asked).kv_cache_dtype == dtype


def test_bfloat16_on_an_old_gpu_is_replaced_where_the_release_does_so() -> None:
    assert settle("0.8.0", LLAMA, T4).dtype == "bfloat16"
    assert settle("0.10.0", LLAMA, T4).dtype == "float16"
    assert settle("0.8.0", LLAMA, T4, dtype="half").dtype == "float16"


def test_a_float32_checkpoint_runs_at_half_the_width() -> None:
    assert settle("0.8.0", BERT).dtype == "float16"
    assert settle("0.9.1", BERT).dtype == "bfloat16"
    assert settle("0.32.0", BERT).dtype == "float16"
    assert settle("0.32.0", BERT, dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("given_args", "said"),
    [
        ({"max_model_len": 200_000}, "User-specified max_model_len (200000) is greater than the derived max_model_len"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 256}, "must be greater than or equal to max_num_seqs (512)"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}, "is smaller than max_model_len (131072)"),
        ({"tensor_parallel_size": 3}, "attention heads (32) must be divisible by tensor parallel size (3)"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "dcp_size=3"),
    ],
)
def test_what_vllm_refuses_is_refused_in_its_words(given_args: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedByVllm) as caught:
        settle("0.32.0", **given_args)
    assert said in caught.value.vllm_message
    assert caught.value.hint


def test_experts_are_split_over_prefill_context_parallel_ranks_too() -> None:
    with pytest.raises(RefusedByVllm, match="14336 is not divisible by 3"):
        settle("0.32.0", MOE, prefill_context_parallel_size=3)


def test_state_blocks_have_a_size_of_their_own_only_where_prefixes_are_cached() -> None:
    with pytest.raises(RefusedByVllm) as caught:
        settle("0.26.0", HYBRID, mamba_block_size=512)
    assert caught.value.vllm_message == "--mamba-block-size can only be set with --enable-prefix-caching"
    assert settle("0.26.0", HYBRID, mamba_block_size=512, enable_prefix_caching=True).enable_prefix_caching


@pytest.mark.parametrize(
    "given_args",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": -4},
        {"max_num_batched_tokens": 2**60},
        {"max_model_len": 0},
        {"max_model_len": -7},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": -1.0},
        {"cpu_offload_gb": -1.0},
        {"tensor_parallel_size": 0},
        {"dtype": "float17"},
        {"block_size": -16},
    ],
)
def test_values_out_of_range_are_refused(given_args: dict[str, Any]) -> None:
    with pytest.raises(LegroomError) as caught:
        settle("0.32.0", **given_args)
    assert caught.value.exit_code == 2


def test_a_longer_context_may_be_allowed_by_the_environment() -> None:
    found = settle("0.32.0", max_model_len=200_000, env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert found.max_model_len == 200_000


def test_an_automatic_length_starts_from_the_models() -> None:
    found = settle("0.32.0", max_model_len=-1)
    assert (found.max_model_len, found.auto_fit_len) == (131072, True)
    with pytest.raises(LegroomError):
        settle("0.13.0", max_model_len=-1)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope"},
}


@pytest.mark.parametrize(
    ("version", "config", "given_args", "length"),
    [
        ("0.10.0", {"max_position_embeddings": 40960, "rope_scaling": YARN}, {}, 131072),
        ("0.32.0", {"max_position_embeddings": 40960, "rope_scaling": YARN}, {}, 40960),
        ("0.10.0", {"max_position_embeddings": 40960}, {"hf_overrides": {"rope_scaling": YARN}}, 131072),
        ("0.9.0", {"max_position_embeddings": 40960}, {"others": ("--rope-scaling", json.dumps(YARN))}, 131072),
        ("0.32.0", {"max_position_embeddings": 40960}, {"hf_overrides": {"max_position_embeddings": 99}}, 99),
        ("0.11.0", LONGROPE, {}, 131072),
        ("0.11.1", LONGROPE, {}, 4096),
        ("0.11.1", LONGROPE, {"max_model_len": 100_000}, 100_000),
    ],
)
def test_the_length_follows_rope_scaling_and_overrides(
    version: str, config: dict[str, Any], given_args: dict[str, Any], length: int
) -> None:
    model = replace(LLAMA, config=config, max_position_embeddings=config["max_position_embeddings"])
    assert settle(version, model, **given_args).max_model_len == length


def test_a_model_known_by_its_name_alone_is_not_refused_for_its_length() -> None:
    model = replace(LLAMA, config={"max_position_embeddings": 8192}, max_position_embeddings=8192)
    with pytest.raises(RefusedByVllm):
        settle("0.32.0", replace(model, assumed=True), max_model_len=16384)
    assert settle("0.32.0", replace(model, named_alone=True), max_model_len=16384).max_model_len == 16384


def test_a_top_level_override_does_not_reach_a_nested_text_config() -> None:
    model = replace(VISION, config={"max_position_embeddings": 40960}, max_position_embeddings=40960)
    assert settle("0.32.0", model, hf_overrides={"max_position_embeddings": 99}).max_model_len == 40960
    inner = {"text_config": {"max_position_embeddings": 99}}
    assert settle("0.32.0", model, hf_overrides=inner).max_model_len == 99


def test_flags_that_do_nothing_are_noted() -> None:
    assert any("--swap-space" in note for note in settle("0.12.0", swap_space=4.0).notes)
    assert any("0.9.1" in note for note in settle("0.9.1", num_gpu_blocks_override=10).notes)


def test_an_unknown_release_is_noted() -> None:
    assert any("0.10.9" in note for note in resolve(ServeArgs(), LLAMA, H100, release("0.10.9")).notes)


ARGS = st.builds(
    ServeArgs,
    max_model_len=st.none() | st.integers(1, 131072),
    max_num_seqs=st.none() | st.integers(1, 4096),
    max_num_batched_tokens=st.none() | st.integers(1, 65536),
    tensor_parallel_size=st.none() | st.sampled_from([1, 2, 8]),
    pipeline_parallel_size=st.none() | st.sampled_from([1, 2]),
    enforce_eager=st.none() | st.booleans(),
    enable_chunked_prefill=st.none() | st.booleans(),
    enable_prefix_caching=st.none() | st.booleans(),
    async_scheduling=st.none() | st.booleans(),
)


@given(
    ARGS,
    st.sampled_from([LLAMA, SHORT, MOE, HYBRID, MAMBA, SPARSE, CHUNKED, BERT, WHISPER, VISION]),
    st.sampled_from([H100, A100, A10, B200, MI300]),
    st.sampled_from(known_releases()),
)
def test_resolved_settings_hold_together(args: ServeArgs, model: Model, gpu: Gpu, version: str) -> None:
    try:
        found = resolve(args, model, gpu, release(version))
    except LegroomError as refusal:
        assert refusal.hint
        return
    assert found.max_num_seqs <= found.max_num_batched_tokens
    splits_prompts = found.enable_chunked_prefill or model is BERT  # the engine turns it off after the checks
    assert splits_prompts or found.max_num_batched_tokens >= found.max_model_len
    sizes = found.cudagraph_capture_sizes
    assert list(sizes) == sorted(set(sizes))
    assert (found.cudagraph_mode == "NONE") == (not sizes)
    assert found.max_concurrent_batches >= found.pipeline_parallel_size
    assert not (found.graph_estimate_applied and release(version).before("0.18.0"))
    assert found.engine == "V1" or release(version).before("0.11.0")


def test_prefill_context_parallel_ranks_are_gpus_too() -> None:
    found = settle("0.25.1", tensor_parallel_size=2, prefill_context_parallel_size=2)
    assert found.gpus_used == found.given.gpus_needed == 4


def test_chunked_prefill_is_off_without_a_kv_cache() -> None:
    assert not settle("0.32.0", BERT, enable_chunked_prefill=True).enable_chunked_prefill


def test_hybrid_models_took_no_context_parallelism_before_0_26() -> None:
    shared = {"tensor_parallel_size": 16, "decode_context_parallel_size": 2}
    with pytest.raises(RefusedByVllm, match="Hybrid KV cache groups"):
        settle("0.22.1", HYBRID, **shared)
