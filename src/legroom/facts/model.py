"""What is true of a model, independent of vLLM: its layers, widths and stored precision.

`Model` is what the rest of legroom knows of a checkpoint. It is read from a config.json by `facts.config`;
the parts of a layer live in `facts.attention` and `facts.feedforward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.facts.attention import Mixer
from legroom.facts.feedforward import FeedForward
from legroom.facts.modalities import Modality
from legroom.facts.quantization import Quantization
from legroom.records import dataclass, field


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: how it mixes tokens, and how it transforms each. Hybrid models may lack either."""

    mixer: Mixer | None
    feedforward: FeedForward | None
    also: tuple[Mixer, ...] = ()
    """Further mixers of the layer: cross attention of an encoder-decoder, the attention beside Falcon-H1's Mamba."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's architecture. Sizes are of the whole model, before any sharding."""

    name: str
    architecture: str
    model_type: str
    dtype: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    """The longest length vLLM derives from the config when no --max-model-len is given (rope scaling applied)."""
    layers: tuple[Layer, ...]
    tie_word_embeddings: bool = False
    quantization: Quantization | None = None
    modalities: tuple[Modality, ...] = ()
    """Vision, audio ... encoders that come with the language model."""
    encoder_layers: tuple[Layer, ...] = ()
    """The encoder of an encoder-decoder model (Whisper, BART)."""
    draft_layers: tuple[Layer, ...] = ()
    """Multi-token-prediction layers stored in the checkpoint, loaded only when speculative decoding asks for them."""
    draft: Model | None = None
    """The other checkpoint that drafts for this one, where the flags name it and it could be read."""
    is_pooling: bool = False
    checkpoint_bytes: int | None = None
    """Total bytes of the safetensors headers, where they were read."""
    known: bool = True
    """False: legroom does not know this architecture and read it as a plain transformer."""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)
    """The text config as read, for parts that need a rare field."""
    source: str = ""
