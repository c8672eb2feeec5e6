"""The stacked adapter buffers that --enable-lora allocates for every module an adapter may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from legroom.facts.releases import release as known_release
from legroom.memory.module import Module
from legroom.units import round_up

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.vllm.args import EngineSettings

EXTRA_VOCABULARY = 256
"""Tokens that an adapter could add, until 0.11: the tables had room for them, and were padded to 256 rows."""


def extra_vocabulary(settings: EngineSettings) -> int:
    """Rows that LoRA adds to the vocabulary of this release; 0.12 dropped them."""
    wanted = bool(settings.given.enable_lora) and known_release(settings.release).before("0.12.0")
    return EXTRA_VOCABULARY if wanted else 0


def lora_buffers(
    modules: Iterable[Module], model: Model, settings: EngineSettings, dtype_bytes: int
) -> Iterator[Module]:
    """One pair of matrices a slice of every linear layer, room for `max_loras` adapters of `max_lora_rank` in each."""
    given = settings.given
    if not given.enable_lora:
        return
    slots, rank = given.max_loras or 1, given.max_lora_rank or 16
    experts = known_release(settings.release).at_least("0.11.2")
    for module in modules:
        if module.part == "embeddings" and module.name == "embed_tokens":
            yield Module("lora", "embed_a", slots * (model.vocab_size + extra_vocabulary(settings)), rank)
            yield Module("lora", "embed_b", slots * model.hidden_size, rank)
        elif module.quantizable and module.name != "lm_head" and (module.copies == 1 or experts):
            slices = module.slices or (module.outputs,)
            for _ in slices:
                yield Module("lora", f"{module.name}_a", slots * module.copies * rank, module.inputs)
            for outputs in slices:
                yield Module("lora", f"{module.name}_b", slots * module.copies * outputs, rank)
    vocabulary = model.vocab_size
    if extra_vocabulary(settings):
        vocabulary = round_up(vocabulary + EXTRA_VOCABULARY, 256)
    yield Module("lora", "logits_a", slots * rank, model.hidden_size)
    yield Module("lora", "logits_b", slots * vocabulary, rank)
    tokens = settings.max_num_batched_tokens
    # Index tensors of the adapter kernels: five of 64-bit and four of 32-bit numbers, one a token.
    yield Module("lora", "indices", 14 * tokens, dtype="float32")
