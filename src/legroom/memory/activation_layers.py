"""What one decoder layer keeps alive for every token of the profile run.

The profile run pushes `max_num_batched_tokens` tokens through the model. Layers run one after another, so the peak is
that of the greediest layer, not a sum over layers. Widths are counted in elements of the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.facts.attention import Attention, LatentAttention, StateSpace
from legroom.facts.feedforward import Dense, Experts
from legroom.facts.model import Layer, Model
from legroom.units import cdiv


@dataclass(frozen=True, slots=True)
class Live:
    """Elements alive at one moment of a layer, for each token, and how they add up."""

    where: str
    elements: int
    how: str


def shard(width: int, ranks: int) -> int:
    """A width cut over tensor-parallel ranks."""
    return cdiv(width, ranks)


def mixer_output_width(layer: Layer, ranks: int) -> int:
    """The width a layer's mixer hands to its output projection."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        return shard(mixer.heads, ranks) * mixer.v_head_dim
    if isinstance(mixer, LatentAttention):
        return shard(mixer.heads, ranks) * mixer.v_head_dim
    return 0


def mixer_live(layer: Layer, hidden: int, ranks: int) -> Live:
    """The residual, the normed input, the projections, what the mixer writes, and the output projection."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        heads = shard(mixer.heads, ranks)
        kv_heads = max(1, mixer.kv_heads // ranks)
        query, key, value = heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim
        normed = query + key if mixer.qk_norm else 0
        gate = query if mixer.output_gate else 0
        elements = 3 * hidden + query + key + value + normed + 2 * gate + heads * mixer.v_head_dim
        return Live("attention", elements, "3 x hidden + qkv + normed q, k + attention output")
    if isinstance(mixer, LatentAttention):
        heads = shard(mixer.heads, ranks)
        query = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
        latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim + (mixer.q_lora_rank or 0)
        expanded = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim)
        elements = 3 * hidden + query + 2 * latent + expanded + heads * mixer.v_head_dim
        return Live("latent attention", elements, "3 x hidden + q + latents + expanded keys and values + output")
    if isinstance(mixer, StateSpace):
        return Live("state space", 3 * hidden + _state_space_width(mixer, ranks), "3 x hidden + projections")
    return Live("mixer", 2 * hidden, "2 x hidden")


def _state_space_width(mixer: StateSpace, ranks: int) -> int:
    widths = dict(mixer.config)
    inner = widths.get("intermediate_size", 0) or widths.get("value_dim", 0) or 2 * widths.get("hidden_size", 0)
    return 4 * shard(inner, ranks)


def feedforward_live(layer: Layer, hidden: int, ranks: int) -> Live | None:
    """A dense block at its widest: gate and up, their product, the residual, the input and the mixer's output."""
    block = layer.feedforward
    held = 2 * hidden + mixer_output_width(layer, ranks)
    if isinstance(block, Dense):
        inner = shard(block.intermediate_size, ranks)
        times = 3 if block.gated else 2
        return Live("feed-forward", times * inner + held, f"{times} x intermediate + 2 x hidden + attention output")
    if isinstance(block, Experts):
        shared = 3 * shard(block.shared_intermediate_size, ranks)
        elements = held + 2 * hidden + 2 * block.num_experts + shared
        return Live("experts", elements, "4 x hidden + attention output + router logits + shared experts")
    return None


def expert_workspace(layer: Layer, ranks: int, expert_parallel: bool) -> int:
    """Elements a token of the two scratch buffers that the fused experts keep for good."""
    block = layer.feedforward
    if not isinstance(block, Experts):
        return 0
    inner = block.intermediate_size if expert_parallel else shard(block.intermediate_size, ranks)
    width = block.latent_size or block.hidden_size
    gate_up = 2 * inner if block.gated else inner
    return block.experts_per_token * (max(inner, width) + max(gate_up, width))


def distinct_layers(model: Model) -> tuple[Layer, ...]:
    """Every kind of layer once: the peak is that of the greediest."""
    return tuple(dict.fromkeys(model.layers))
