"""The vision and audio towers of a model, in the order vLLM creates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.memory.weights.module import Module
from legroom.units import cdiv
from legroom.vllm.traits import replicates_encoders

if TYPE_CHECKING:
    from legroom.facts.model import Linear, Modality, Model
    from legroom.vllm.args import EngineSettings


def encoder_modules(model: Model, settings: EngineSettings, tensor_ranks: int) -> Iterator[Module]:
    """vLLM builds encoders on every stage, split like a decoder's unless each rank has them whole."""
    ranks = 1 if replicates_encoders(settings.given) else tensor_ranks
    for encoder in model.modalities:
        for weight in _by_block(encoder):
            outputs = cdiv(weight.outputs, ranks) if weight.split == "out" else weight.outputs
            inputs = cdiv(weight.inputs, ranks) if weight.split == "in" else weight.inputs
            part = "buffers" if weight.name == "rotary_table" else "encoder"
            yield Module(part, weight.name, outputs, inputs, weight.bias, dtype=weight.dtype)
        for _ in range(encoder.buffer_levels):
            yield Module("buffers", "deepstack_input_embeds", settings.max_num_batched_tokens, model.hidden_size)


def _by_block(encoder: Modality) -> Iterator[Linear]:
    """Every weight once, those of the blocks in the order of the blocks: it decides how the allocator packs them."""
    repeated: list[Linear] = []

    def blocks() -> Iterator[Linear]:
        for _ in range(encoder.num_layers):
            for weight in repeated:
                yield from [weight] * (weight.count // encoder.num_layers)
        repeated.clear()

    for weight in encoder.weights:
        if encoder.num_layers > 1 and weight.count % encoder.num_layers == 0:
            repeated.append(weight)
            continue
        yield from blocks()
        yield from [weight] * weight.count
    yield from blocks()
