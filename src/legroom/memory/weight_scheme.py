"""The quantization in use: what the checkpoint says, and what --quantization makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.quantization_config import online_quantization

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.facts.quantization import Quantization
    from legroom.vllm.args import EngineSettings


def scheme_in_use(model: Model, settings: EngineSettings) -> Quantization | None:
    """None: weights are stored in the model's dtype."""
    if model.quantization is not None:
        return model.quantization
    return online_quantization(settings.quantization) if settings.quantization else None
