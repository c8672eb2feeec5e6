"""Zamba2: layers with attention share a few transformer blocks, and have adapters and KV caches of their own."""

from __future__ import annotations

from recorded_runs import H200, settle

from legroom.facts.config.model_config import model_from_config
from legroom.memory.deployment_memory import deployment_memory

HYBRID = [6, 12, 18, 24, 30, 36, 42, 47, 51]
ZAMBA2 = model_from_config(
    {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "torch_dtype": "bfloat16",
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_mem_blocks": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "attention_head_dim": 160,
        "attention_hidden_size": 5120,
        "intermediate_size": 10240,
        "adapter_rank": 128,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 80,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "hybrid_layer_ids": HYBRID,
    }
)


def test_weights_pages_and_activation_are_as_measured_on_an_h200() -> None:
    flags = {"gpu_memory_utilization": 0.9, "max_model_len": 4096, "enforce_eager": True}
    settings = settle(ZAMBA2, "0.32.0", H200, max_num_batched_tokens=8192, max_num_seqs=256, **flags)
    memory = deployment_memory(ZAMBA2, H200, settings)
    layout = memory.tightest
    assert abs(layout.weights.bytes - 5442123264) < 2**15
    assert abs(layout.activation.bytes - 1207965184) < 2**15
    assert abs(layout.kv_cache.bytes - 128138439168) < 2**25
    assert {(len(group.layers), group.spec.page_bytes) for group in memory.kv.shape.groups} == {(9, 983040)}
    assert len(memory.kv.shape.groups) == 7
