"""The values of --quantization that each kind of quantized checkpoint accepts."""

from __future__ import annotations

import sys
from typing import Any

from vllm_answers.partial_config import Partial

_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "deepseek_v4": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "modelopt_fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "quantization": {"quant_algo": "FP8"}},
    "modelopt_nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "quantization": {"quant_algo": "NVFP4"}},
    "modelopt_mixed": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantization": {"quant_algo": "MIXED_PRECISION"},
    },
    "mxfp4": {"quant_method": "mxfp4"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "quark": {"quant_method": "quark"},
    "torchao": {"quant_method": "torchao"},
}
_MODEL_TYPES = {"deepseek_v4": "deepseek_v4", "mxfp4": "gpt_oss"}


def quantization_overrides() -> dict[str, Any]:
    """By kind of checkpoint: the method without the flag, the flags that pass, and whether every flag does."""
    from vllm.model_executor.layers import quantization

    names = [*quantization.QUANTIZATION_METHODS, "no_such_method"]
    found: dict[str, Any] = {}
    for kind, config in _CHECKPOINTS.items():
        accepted = {name: _method_of(kind, config, name) for name in names}
        passing = [name for name in names if accepted[name]]
        every = len(passing) == len(names)
        method = _method_of(kind, config, None)
        found[kind] = {"method": method, "every_flag": every, "flags": [] if every else sorted(passing)}
    return found


def _method_of(kind: str, config: dict[str, Any], flag: str | None) -> str | None:
    """The method that the release resolves for a checkpoint; None where it refuses the flag."""
    from vllm.config import ModelConfig

    hf_config = Partial(model_type=_MODEL_TYPES.get(kind, "llama"), quantization_config=config, architectures=[""])
    asked = Partial(quantization=flag, hf_config=hf_config, allow_deprecated_quantization=True)
    asked.model_arch_config = Partial(quantization_config=dict(config))
    asked._parse_quant_hf_config = lambda _: dict(config)
    try:
        ModelConfig._verify_quantization(asked)
    except ValueError as error:
        if flag is None:
            print(f"{kind}: {error}", file=sys.stderr)
        return None
    return str(asked.quantization)
