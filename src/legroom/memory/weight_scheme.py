"""The quantization in use: what the checkpoint says, and what --quantization makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.facts.quantization import Quantization
from legroom.facts.quantization_config import online_quantization

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

_FP8_BLOCKS = Quantization(
    "fp8", 8, block=(128, 128), number="float", strategy="block", dynamic_activations=True, scale_bits=32
)


def scheme_in_use(model: Model, settings: EngineSettings) -> Quantization | None:
    """None: weights are stored in the model's dtype."""
    stated, asked = model.quantization, settings.quantization
    if stated is None:
        return online_quantization(asked) if asked else None
    if asked == "fp8" and stated.method.startswith("modelopt"):
        # vLLM would refuse a modelopt checkpoint here, so the config at hand is of a sibling: FP8 ones use blocks.
        return replace(_FP8_BLOCKS, ignored=stated.ignored)
    return stated
