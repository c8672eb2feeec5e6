"""A figure that was remembered is the figure that computing it again would give, whichever flag changed in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.models import load
from legroom.facts.releases import release
from legroom.memory.activation.peak import activation
from legroom.memory.graphs import graph_bytes, graph_estimate
from legroom.memory.kv.shape import kv_shape
from legroom.memory.overhead import non_torch, outside
from legroom.memory.weights.loaded import weights
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve

MODELS = [
    "meta-llama/Llama-3.1-8B-Instruct",
    "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "ibm-granite/granite-4.0-h-small",
    "deepseek-ai/DeepSeek-V3.2",
]
CHANGES = [
    {"dtype": "float16"}, {"dtype": "float32"}, {"quantization": "fp8"}, {"quantization": "bitsandbytes"},
    {"kv_cache_dtype": "fp8"}, {"max_model_len": 4096}, {"max_num_seqs": 7}, {"max_num_batched_tokens": 1024},
    {"gpu_memory_utilization": 0.5}, {"block_size": 128}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2}, {"data_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True}, {"enforce_eager": True},
    {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, {"enable_prefix_caching": False},
    {"enable_prefix_caching": True}, {"async_scheduling": False}, {"disable_hybrid_kv_cache_manager": True},
    {"cpu_offload_gb": 2.0}, {"enable_lora": True}, {"enable_lora": True, "max_loras": 4},
    {"enable_lora": True, "max_lora_rank": 64}, {"enable_lora": True, "max_num_batched_tokens": 1024},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    {"speculative_config": {"method": "eagle", "model": "some/head", "num_speculative_tokens": 1}},
    {"speculative_config": {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 1}},
    {"compilation_config": {"mode": 0}}, {"cudagraph_capture_sizes": (1, 2, 4)},
    {"limit_mm_per_prompt": {"image": 0, "video": 0}}, {"limit_mm_per_prompt": {"image": 3}},
    {"mm_processor_kwargs": {"max_pixels": 200704}}, {"skip_mm_profiling": True}, {"language_model_only": True},
    {"mamba_cache_dtype": "float32"}, {"mamba_ssm_cache_dtype": "float32"}, {"mamba_cache_mode": "align"},
    {"attention_backend": "TRITON_MLA"}, {"runner": "pooling"}, {"others": ("--task", "embed")},
    {"env": {"VLLM_MLA_DISABLE": "1"}}, {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
    {"env": {"VLLM_ATTENTION_BACKEND": "TRITON_MLA"}}, {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    {"env": {"VLLM_PP_LAYER_PARTITION": "10,17"}, "pipeline_parallel_size": 2},
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_no_flag_is_missing_from_what_a_remembered_figure_depends_on(name):
    model = load(name)
    figures = (weights, activation, non_torch, outside)
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
