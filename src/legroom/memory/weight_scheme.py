"""The quantization in use: what the checkpoint says, and what --quantization makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.quantization_config import online_quantization

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.facts.quantization import Quantization
    from legroom.vllm.args import EngineSettings


def scheme_in_use(model: Model, settings: EngineSettings) -> Quantization | None:
    """None: weights are stored in the model's dtype.

    A checkpoint says how it is stored. Where --quantization names another method, vLLM refuses the pair, so the config
    at hand is not that of the weights that were loaded: the flag is believed, as far as it says how weights are stored.
    """
    stated, asked = model.quantization, settings.given.quantization or settings.quantization
    if stated is None or (asked and not _agree(stated.method, asked)):
        return (online_quantization(asked) if asked else None) or stated
    return stated


def _agree(stated: str, asked: str) -> bool:
    """The same method, or one that runs it by other kernels (awq and awq_marlin, modelopt and modelopt_fp4)."""
    return stated.startswith(asked) or asked.startswith(stated)
