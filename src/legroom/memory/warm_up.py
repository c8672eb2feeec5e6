"""What torch keeps cached after one uncaptured pass of a decode batch: the warm-up before a full graph's capture.

The V2 runner of 0.29+ samples the free memory between that pass and the capture. The capture first gives the cached
blocks back, so the sample is below zero and the estimate of all graphs grows by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.attention import Attention, LatentAttention
from legroom.facts.model import Dense
from legroom.memory.activation.experts import expert_scratch
from legroom.memory.activation.peak import element_bytes
from legroom.memory.attention_scratch import split_buffers
from legroom.memory.cache import cached_by_model
from legroom.memory.weights.torch_allocator import TorchAllocator
from legroom.units import MIB, cdiv

if TYPE_CHECKING:
    from legroom.facts.attention import Mixer
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import FeedForward, Model
    from legroom.memory.weights.torch_allocator import AllocatorBlock
    from legroom.vllm.args import EngineSettings

_LAYERS = 6
"""The blocks of the first layers are there for all later ones."""
_SMALL_SEGMENTS = 2 * MIB


def warm_up_cache(model: Model, settings: EngineSettings, gpu: Gpu, sequences: int) -> int:
    """Bytes of the segments that a pass of `sequences` decode tokens leaves behind."""
    token = sequences * element_bytes(settings)
    split = split_buffers(model, settings, gpu, sequences)
    passing = expert_scratch(model, settings, gpu).passing_elements // settings.max_num_batched_tokens
    return cached_by_model(_segments, model, settings.tensor_parallel_size, token, split, passing)


def _segments(model: Model, ranks: int, token: int, split: int, passing: int) -> int:
    """`token`: bytes of one value of each sequence; `split`, `passing`: what attention and experts ask for."""
    allocator = TorchAllocator()
    hidden = model.hidden_size * token
    residual, normed = allocator.allocate(hidden), allocator.allocate(hidden)
    for layer in model.layers[:_LAYERS]:
        heads, out = _mixer_widths(layer.mixer, model.hidden_size, ranks)
        projected = allocator.allocate(heads * token)
        allocator.free(normed)
        output = allocator.allocate(out * token)
        if split and isinstance(layer.mixer, Attention | LatentAttention):
            sums = split // (_output_width(layer.mixer) + 1)
            _use(allocator, split - sums, sums)
        allocator.free(projected)
        after = allocator.allocate(hidden)
        allocator.free(output)
        residual, normed = _add_and_normalize(allocator, after, residual, hidden)
        wide, narrow = _feedforward_widths(layer.feedforward, passing, ranks)
        gate_up = allocator.allocate(wide * token)
        allocator.free(normed)
        activated = allocator.allocate(narrow * token)
        allocator.free(gate_up)
        down = allocator.allocate(hidden)
        allocator.free(activated)
        residual, normed = _add_and_normalize(allocator, down, residual, hidden)
    return allocator.reserved_bytes + _SMALL_SEGMENTS


def _add_and_normalize(
    allocator: TorchAllocator, added: AllocatorBlock, residual: AllocatorBlock, hidden: int
) -> tuple[AllocatorBlock, AllocatorBlock]:
    summed, normed = allocator.allocate(hidden), allocator.allocate(hidden)
    allocator.free(added)
    allocator.free(residual)
    return summed, normed


def _use(allocator: TorchAllocator, *sizes: int) -> None:
    for block in [allocator.allocate(size) for size in sizes]:
        allocator.free(block)


def _output_width(mixer: Attention | LatentAttention) -> int:
    return mixer.kv_lora_rank if isinstance(mixer, LatentAttention) else mixer.v_head_dim


def _mixer_widths(mixer: Mixer | None, hidden: int, ranks: int) -> tuple[int, int]:
    """Elements a token of what goes into the mixer and of what it returns."""
    if isinstance(mixer, Attention):
        heads = cdiv(mixer.heads, ranks)
        return heads * mixer.head_dim + cdiv(mixer.kv_heads, ranks) * mixer.score_width, heads * mixer.v_head_dim
    if isinstance(mixer, LatentAttention):
        heads = cdiv(mixer.heads, ranks)
        return heads * mixer.latent_width, heads * mixer.kv_lora_rank
    return 3 * cdiv(hidden, ranks), cdiv(hidden, ranks)


def _feedforward_widths(block: FeedForward | None, passing: int, ranks: int) -> tuple[int, int]:
    """Elements a token of the first product and of what the activation leaves of it."""
    if isinstance(block, Dense):
        inner = cdiv(block.intermediate_size, ranks)
        return (2 * inner if block.gated else inner), inner
    return passing // 2, passing - passing // 2
