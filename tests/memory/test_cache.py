"""A cached figure is the figure that computing it again would give, whichever flag changed in between."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.activation.profile_run import activation
from legroom.memory.cudagraph_memory import graph_bytes, graph_estimate
from legroom.memory.figure_cache import Inputs, cached
from legroom.memory.kv.shape import kv_shape
from legroom.memory.overhead import non_torch, outside
from legroom.memory.weights.loaded import weights
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve

MODELS = [
    "meta-llama/Llama-3.1-8B-Instruct",
    "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "ibm-granite/granite-4.0-h-small",
    "deepseek-ai/DeepSeek-V3.2",
]
CHANGES = [
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"quantization": "fp8"},
    {"quantization": "bitsandbytes"},
    {"kv_cache_dtype": "fp8"},
    {"max_model_len": 4096},
    {"max_num_seqs": 7},
    {"max_num_batched_tokens": 1024},
    {"gpu_memory_utilization": 0.5},
    {"block_size": 128},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"enforce_eager": True},
    {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    {"enable_prefix_caching": False},
    {"enable_prefix_caching": True},
    {"async_scheduling": False},
    {"disable_hybrid_kv_cache_manager": True},
    {"cpu_offload_gb": 2.0},
    {"enable_lora": True},
    {"enable_lora": True, "max_loras": 4},
    {"enable_lora": True, "max_lora_rank": 64},
    {"enable_lora": True, "max_num_batched_tokens": 1024},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    {"speculative_config": {"method": "eagle", "model": "some/head", "num_speculative_tokens": 1}},
    {"speculative_config": {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 1}},
    {"compilation_config": {"mode": 0}},
    {"cudagraph_capture_sizes": (1, 2, 4)},
    {"limit_mm_per_prompt": {"image": 0, "video": 0}},
    {"limit_mm_per_prompt": {"image": 3}},
    {"mm_processor_kwargs": {"max_pixels": 200704}},
    {"skip_mm_profiling": True},
    {"language_model_only": True},
    {"mamba_cache_dtype": "float32"},
    {"mamba_ssm_cache_dtype": "float32"},
    {"mamba_cache_mode": "align"},
    {"attention_backend": "TRITON_MLA"},
    {"runner": "pooling"},
    {"others": ("--task", "embed")},
    {"env": {"VLLM_MLA_DISABLE": "1"}},
    {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
    {"env": {"VLLM_ATTENTION_BACKEND": "TRITON_MLA"}},
    {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    {"env": {"VLLM_PP_LAYER_PARTITION": "1,3"}, "pipeline_parallel_size": 2},
]


def _of_four_layers(name):
    """A model with as many kinds of layers as it has, and few of them: computing a figure takes no time then."""
    model = load(name)
    kinds = list({repr(layer): layer for layer in model.layers}.values())
    return replace(model, layers=tuple((kinds * 4)[: max(4, len(kinds))]))


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_figure_is_the_one_that_computing_it_again_would_give(name):
    model = _of_four_layers(name)
    figures = (weights, activation, non_torch, outside)
    compared = 0
    for version, card in (("0.10.2", "a100"), ("0.32.0", "h100")):
        for change in ({}, *CHANGES):
            args = replace(ServeArgs(model=name, max_model_len=8192), **change)
            try:
                settings = resolve(args, model, gpu(card), release(version))
                fresh = replace(model)
                wanted = [rule(fresh, settings, gpu(card), 0) for rule in figures]
            except LegroomError:
                continue
            assert [rule(model, settings, gpu(card), 0) for rule in figures] == wanted, (change, version, card)
            for rule in (graph_bytes, graph_estimate, kv_shape):
                assert rule(model, settings, gpu(card)) == rule(fresh, settings, gpu(card)), (change, version, card)
            compared += 1
    assert compared > len(CHANGES)


LEFT_OUT = ("notes", "max_model_len")
INPUTS = Inputs(*LEFT_OUT)


def _settings():
    return resolve(ServeArgs(max_model_len=8192), load("llama-3.1-8b"), gpu("h100"), release("0.32.0"))


def test_every_setting_is_part_of_the_key_unless_it_is_left_out():
    settings = _settings()
    for name in (field.name for field in fields(EngineSettings)):
        value = replace(settings.given, others=("--seed", "1")) if name == "given" else "another value"
        changed = replace(settings, **{name: value})
        assert (INPUTS.of(settings) is INPUTS.of(changed)) == (name in LEFT_OUT), name


def test_every_flag_is_part_of_the_key_unless_it_is_left_out():
    settings = _settings()
    for name in (field.name for field in fields(ServeArgs)):
        changed = replace(settings, given=replace(settings.given, **{name: "another value"}))
        assert (INPUTS.of(settings) is INPUTS.of(changed)) == (name in LEFT_OUT), name


@pytest.mark.parametrize(
    "rule",
    [
        lambda model, settings, gpu, rank: settings.max_model_len + 1,
        lambda model, settings, gpu, rank: settings.max_model_len > 1,
        lambda model, settings, gpu, rank: 1 if settings.max_model_len else 0,
        lambda model, settings, gpu, rank: settings.max_model_len == 8192,
        lambda model, settings, gpu, rank: f"{settings.given.max_model_len} tokens",
    ],
)
def test_a_rule_that_reads_a_setting_its_key_lacks_fails_at_once(rule):
    with pytest.raises(TypeError):
        cached(INPUTS)(rule)(load("llama-3.1-8b"), _settings(), gpu("h100"))


def test_a_figure_is_computed_once_for_settings_that_differ_in_what_is_left_out():
    model, card, calls = load("llama-3.1-8b"), gpu("h100"), []
    settings = _settings()

    def rule(model, settings, gpu, rank):
        calls.append(settings.max_num_seqs)
        return 0

    for length in (1024, 2048, 4096):
        cached(INPUTS)(rule)(model, replace(settings, max_model_len=length), card)
    cached(INPUTS)(rule)(model, replace(settings, max_num_seqs=7), card)
    assert calls == [settings.max_num_seqs, 7]


def test_leaving_out_a_setting_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="max_length"):
        Inputs("max_length")
