"""Folders with tiny models that a real vLLM serves: a config and a byte-level tokenizer, weights made up at load.

    python tests/real_vllm/tiny_models.py DIR [KIND ...]

writes DIR/KIND for every kind named (all of them without one). Only the standard library is needed: serve a folder with
`--load-format dummy` and there is no weight file to make. A token is a byte, so a prompt of N letters has N tokens.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from array import array
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src/legroom"
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3moe": _COMMON | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "gemma3": _COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "deepseekv2": {name: value for name, value in _COMMON.items() if name != "head_dim"}
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "qwen3next": _COMMON
    | _EXPERTS
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
    },
    "mamba_hybrid": _COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba"] * 3 + ["attention"],
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.17,
        "logits_scaling": 1.0,
    },
}

SERVE_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""What a CPU build of vLLM needs to start quickly and quietly on a small machine."""
SERVE_FLAGS = ("--load-format", "dummy", "--enforce-eager", "--dtype", "float32")
"""No weights are read, nothing is compiled; bfloat16 takes AMX instructions, which some virtual machines announce and
do not run."""


def write_model(folder: Path, kind: str = "llama", **config: Any) -> Path:
    """A folder that `vllm serve FOLDER --load-format dummy` takes; `config` replaces keys of the kind's config."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", KINDS[kind] | config)
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write(folder / "tokenizer.json", _tokenizer())
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1],
            "model_max_length": 1_000_000,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def write_lora(folder: Path, rank: int = 8) -> Path:
    """A LoRA adapter for the Llama of `write_model`, as PEFT writes one; serve it with
    `--enable-lora --lora-modules NAME=FOLDER`.

    Made-up weights are a thousandth at the most, so attention hardly adds to what a token's embedding says. With values
    and outputs of this adapter's size it decides which token comes next."""
    folder.mkdir(parents=True, exist_ok=True)
    config = KINDS["llama"]
    outputs = {"v_proj": config["num_key_value_heads"] * config["head_dim"], "o_proj": config["hidden_size"]}
    _write(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 4 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(outputs),
            "inference_mode": True,
        },
    )
    dice, tensors = random.Random(1), {}
    for layer in range(config["num_hidden_layers"]):
        for module, width in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", [rank, config["hidden_size"]]), ("lora_B", [width, rank])):
                values = array("f", (dice.gauss(0, 1) for _ in range(shape[0] * shape[1])))
                tensors[f"{name}.{part}.weight"] = shape, values
    _write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def _write_safetensors(path: Path, tensors: dict[str, tuple[list[int], array[float]]]) -> None:
    header, offset = {}, 0
    for name, (shape, values) in tensors.items():
        end = offset + values.itemsize * len(values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(values for _, values in tensors.values()))


def serve_words(python: Path, model: Path, port: int, *flags: str) -> list[str]:
    """The command line that serves a tiny model with the vLLM beside `python`; run it with SERVE_ENV."""
    return [
        str(python.parent / "vllm"),
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *SERVE_FLAGS,
        *flags,
    ]


def beside_vllm(folder: Path) -> str:
    """A PYTHONPATH that holds legroom as if it were installed with vLLM, its plugin included. A copy, so that a server
    comes back with the very code it had, whatever is edited meanwhile."""
    unpacked = folder / "beside_vllm"
    shutil.copytree(SOURCE, unpacked / "legroom", ignore=shutil.ignore_patterns("__pycache__"))
    (entries,) = (file for file in distribution("legroom").files or () if file.name == "entry_points.txt")
    metadata = Path(str(entries.locate())).parent
    shutil.copytree(metadata, unpacked / metadata.name)
    return str(unpacked)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE without merges: the special tokens, then one token for every byte."""
    alphabet = [*SPECIAL, *(_byte_letter(byte) for byte in range(256))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "pre_tokenizer": level,
        "decoder": level,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, text in enumerate(SPECIAL)
        ],
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(alphabet)},
            "merges": [],
        },
    }


def _byte_letter(byte: int) -> str:
    """The letter that stands for a byte in byte-level vocabularies: itself if it prints, else one from U+0100 on."""
    if _prints(byte):
        return chr(byte)
    return chr(0x100 + sum(not _prints(other) for other in range(byte)))


def _prints(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


def main(words: Sequence[str]) -> None:
    if not words or (unknown := set(words[1:]) - set(KINDS)):
        sys.exit(
            f"usage: tiny_models.py DIR [KIND ...]; kinds: {' '.join(KINDS)}" + (f"; not {unknown}" if words else "")
        )
    for kind in words[1:] or KINDS:
        print(write_model(Path(words[0]) / kind, kind))


if __name__ == "__main__":
    main(sys.argv[1:])
