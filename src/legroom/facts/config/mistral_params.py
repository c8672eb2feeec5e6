"""Mistral's own params.json, written as the config.json it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
_DEFAULT_LEN = 128_000
"""vLLM takes this for a params.json that names no length."""


def config_from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The HF-like config of a Mistral checkpoint that ships params.json only."""
    config: dict[str, Any] = {new: params[old] for old, new in _NAMES.items() if params.get(old) is not None}
    lengths = (params.get("max_position_embeddings"), params.get("max_seq_len"))
    config["max_position_embeddings"] = next((n for n in lengths if n), _DEFAULT_LEN)
    config["torch_dtype"] = params.get("dtype") or "bfloat16"
    config.update({"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    moe = params.get("moe")
    if isinstance(moe, Mapping):
        config.update({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]})
        config["num_local_experts"] = moe.get("num_experts")
        config["num_experts_per_tok"] = moe.get("num_experts_per_tok")
    quantization = params.get("quantization")
    if isinstance(quantization, Mapping) and quantization.get("qformat_weight") == "fp8_e4m3":
        scheme = "static" if quantization.get("qscheme_act") == "TENSOR" else "dynamic"
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    vision = params.get("vision_encoder") or (params.get("multimodal") or {}).get("vision_encoder_args")
    if isinstance(vision, Mapping):
        text = {**config}
        return {
            "model_type": "pixtral",
            "architectures": ["PixtralForConditionalGeneration"],
            "torch_dtype": config["torch_dtype"],
            "text_config": text,
            "vision_config": {**vision, "model_type": "pixtral"},
        }
    return config
