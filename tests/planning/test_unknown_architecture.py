"""A model whose architecture legroom does not know: its layers may share weights, so a shortfall is no refusal."""

from __future__ import annotations

import json

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.vllm.args import ServeArgs

CONFIG = {
    "architectures": ["SharedBlocksForCausalLM"],
    "model_type": "shared_blocks",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def test_weights_of_an_unknown_architecture_have_a_range_down_to_shared_layers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = make_plan(ServeArgs(model=str(tmp_path)), release("0.32.0"), Machine(gpu="rtx4090"), advice=False)
    weights = plan.layout.weights
    assert weights.low < 0.5 * weights.bytes
    assert plan.verdict == "tight"


def test_the_same_layers_of_a_known_architecture_are_refused(tmp_path):
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(ServeArgs(model=str(tmp_path)), release("0.32.0"), Machine(gpu="rtx4090"), advice=False)
    assert plan.layout.weights.kind == "exact"
    assert plan.verdict == "does_not_fit"
