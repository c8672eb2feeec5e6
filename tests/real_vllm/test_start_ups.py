"""What legroom says of the KV cache is what a real vLLM 0.32 does with it: blocks, fitted lengths and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from legroom.facts.config.model_config import model_from_config
from legroom.facts.gpus import gpu
from legroom.facts.releases import release
from legroom.memory.kv.kv_plan import KvPlan, kv_plan
from legroom.units import MIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GEMMA = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]),
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
}
QWEN_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
}

# What a CPU would decide otherwise than a GPU is said out loud.
BASE = {"block_size": 128, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "async_scheduling": False}
# vLLM sets up its groups of ranks once a process, those of experts only if the first model has some.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": (QWEN_MOE, {"max_model_len": 4096, "kv_cache_memory_bytes": 9 * MIB}),
    # Blocks of 16: without AMX the CPU build takes no other for latent attention, whatever it is told.
    "latent attention": (DEEPSEEK, {"block_size": 16, "max_model_len": 4096, "kv_cache_memory_bytes": 9 * MIB}),
    "plain": (LLAMA, {"max_model_len": 2048, "kv_cache_memory_bytes": 16 * MIB}),
    "exact fit": (LLAMA, {"max_model_len": 2048, "kv_cache_memory_bytes": 17 * 128 * 1024}),
    "one block short": (LLAMA, {"max_model_len": 2048, "kv_cache_memory_bytes": 16 * 128 * 1024}),
    "too long": (LLAMA, {"max_model_len": 8192, "kv_cache_memory_bytes": 4 * MIB}),
    "fitted": (LLAMA, {"max_model_len": -1, "kv_cache_memory_bytes": 4 * MIB}),
    "override": (LLAMA, {"max_model_len": 2048, "kv_cache_memory_bytes": 16 * MIB, "num_gpu_blocks_override": 40}),
    "fp8 cache": (LLAMA, {"max_model_len": 2048, "kv_cache_memory_bytes": 16 * MIB, "kv_cache_dtype": "fp8"}),
    "sliding window": (GEMMA, {"max_model_len": 8192, "kv_cache_memory_bytes": 16 * MIB}),
    "sliding window too long": (GEMMA, {"max_model_len": 8192, "kv_cache_memory_bytes": 2 * MIB}),
}


@pytest.fixture(scope="module")
def answers(real_vllm) -> dict[str, dict[str, Any]]:
    asked = [{"config": config, "args": BASE | args} for config, args in CASES.values()]
    return dict(zip(CASES, real_vllm(asked), strict=True))


def predicted(name: str) -> KvPlan:
    config, args = CASES[name]
    model, card = model_from_config(config, name), gpu("24GiB")
    settings = resolve(ServeArgs(usage="llm", enforce_eager=True, **(BASE | args)), model, card, release("0.32.0"))
    return kv_plan(model, settings, card, [args["kv_cache_memory_bytes"]])


@pytest.mark.parametrize("name", CASES)
def test_a_real_start_ends_as_predicted(answers, name):
    real, plan = answers[name], predicted(name)
    if name == "fp8 cache" and "requires x86" in real.get("error", ""):
        pytest.skip("the CPU build has an fp8 cache on x86 alone")
    if plan.failure is None:
        assert real == {"blocks": plan.num_blocks, "max_model_len": plan.max_model_len}
    else:
        assert real == {"error": plan.failure.message}


def test_the_cases_hold_starts_and_refusals(answers):
    assert {"error" in answer for answer in answers.values()} == {True, False}
