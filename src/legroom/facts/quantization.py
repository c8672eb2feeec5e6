"""How a checkpoint stores its weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantization:
    """One quantization scheme, and what it leaves alone."""

    method: str
    """vLLM's name: awq, gptq, fp8, compressed-tensors, modelopt, modelopt_fp4, mxfp4, bitsandbytes, gguf ..."""
    weight_bits: int
    group_size: int | None = None
    block: tuple[int, int] | None = None
    zero_point: bool = False
    scale_bits: int = 16
    dynamic_activations: bool = False
    ignored: tuple[str, ...] = ()
    """Module name patterns left unquantized, as the checkpoint writes them."""
    kv_cache_dtype: str | None = None
    """The KV-cache precision that the checkpoint itself asks for, if any."""
    experts_bits: int | None = None
    """Where experts are stored at another width than the rest."""
