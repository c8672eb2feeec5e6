"""The vision and audio towers of a model, in the order vLLM creates them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, repeat
from typing import TYPE_CHECKING

from legroom.memory.weights.module import Module
from legroom.units import cdiv

if TYPE_CHECKING:
    from legroom.facts.model import Linear, Modality, Model


def encoder_modules(model: Model, tp: int, max_num_batched_tokens: int) -> Iterator[Module]:
    """vLLM builds encoders on every stage, their blocks split like a decoder's."""
    for encoder in model.modalities:
        for weight in _in_order(encoder):
            outputs = cdiv(weight.outputs, tp) if weight.split == "out" else weight.outputs
            inputs = cdiv(weight.inputs, tp) if weight.split == "in" else weight.inputs
            yield Module("encoder", weight.name, outputs, inputs, weight.bias, dtype=weight.dtype)
        for _ in range(encoder.feature_levels - 1):
            # DeepStack hands the features of a tapped block over in a buffer that holds a whole step.
            yield Module("buffers", "deepstack_input_embeds", max_num_batched_tokens, model.hidden_size)


def _in_order(encoder: Modality) -> Iterator[Linear]:
    """The weights as vLLM creates them: block by block, which decides what the allocator rounds."""
    for in_blocks, run in groupby(encoder.weights, lambda weight: weight.count >= encoder.num_layers > 1):
        weights = list(run)
        for _ in range(encoder.num_layers if in_blocks else 1):
            for weight in weights:
                yield from repeat(weight, weight.count // encoder.num_layers if in_blocks else weight.count)
        if in_blocks:
            for weight in weights:
                yield from repeat(weight, weight.count % encoder.num_layers)
