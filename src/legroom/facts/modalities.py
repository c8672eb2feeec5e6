"""Encoders that come with a language model."""

from __future__ import annotations

from legroom.facts.linear import Linear
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Modality:
    """A vision or audio encoder and its projector."""

    kind: str
    """image | video | audio"""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    parameters: int
    """Encoder and projector parameters (they are rarely sharded or quantized)."""
    max_tokens_per_item: int
    """Placeholder tokens of the largest item that vLLM profiles with."""
    patch_tokens_per_item: int = 0
    """Tokens inside the encoder before merging."""
    weights: tuple[Linear, ...] = ()
    """Every weight of the encoder and its projector, in the order vLLM creates them."""
    feature_levels: int = 1
    """Features handed to the language model for each token: of the last block, and of those that DeepStack taps."""
    exact: bool = True
    """False: the checkpoint's config says nothing of its encoder, and the usual one of its family is assumed."""
