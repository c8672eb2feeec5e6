"""How a checkpoint stores its weights."""

from __future__ import annotations

from legroom.records import dataclass


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
    number: str = "int"
    """int | float: how the weights' bits are read."""
    strategy: str = "group"
    """What shares a scale: tensor | channel | group | block."""
    static_activations: bool = False
    """The checkpoint holds a scale for the activations of each linear layer."""
    act_order: bool = False
    """GPTQ with desc_act: every input channel names its group (g_idx)."""
    quantizes_lm_head: bool = False
    targets: tuple[str, ...] = ("Linear",)
    """Which modules are quantized: a class name such as Linear, or name patterns."""
    rules: tuple[tuple[str, Quantization], ...] = ()
    """Other schemes for modules whose name matches a pattern (mixed precision); the first match wins."""
    online: bool = False
    """The checkpoint is not quantized: vLLM quantizes while loading (--quantization fp8 on a bf16 model)."""
