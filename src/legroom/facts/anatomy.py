"""What a family's layers hold besides attention and feed-forward: norms, positions. Data in `data/anatomy.json`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from legroom.facts.data_files import read_data


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a family that its config does not spell out. The defaults are those of a Llama."""

    norm: str = "rms"
    """rms: a weight | layer: a weight and a bias | none: no parameters"""
    norms: int = 2
    """Hidden-size norms of a layer."""
    mixer_only_norms: int = -1
    """Norms of a layer without feed-forward (or without mixer); -1: as many as any layer."""
    expert_norms: int = 0
    """Further norms of a layer with experts."""
    final_norm: bool = True
    embeddings_on: str = "first"
    """Pipeline stages that hold the input embeddings: first | all. Some of vLLM's classes do not ask."""
    lm_head_on: str = "last"
    final_norm_on: str = "last"
    embedding_norm: bool = False
    qk_norm: str = ""
    """head: one head's width each | width: all heads, split over ranks | whole: all heads on every rank | per_head:
    a weight for every head of the rank | "" : none unless the attention says so, then head"""
    qk_norm_bias: bool = False
    positions: str = ""
    """The config field that counts learned positions."""
    positions_offset: int = 0
    token_types: str = ""
    lm_head_bias: bool = False
    lm_head: bool = True
    """False: no output layer at all (embedding models)."""
    rope: str = "rope"
    """rope | none | mrope"""
    rope_dtype: str = ""
    """Empty: the model's dtype."""
    rope_layers: str = "all"
    """Which layers have rotary embeddings of their own kind: all | by_type (local and global bases differ)."""
    attention_path: str = "self_attn"
    """What checkpoints call the attention module of a layer, its dense block, and its block of experts."""
    mlp_path: str = "mlp"
    moe_path: str = "mlp"
    scalars_per_layer: int = 0
    """Further buffers of a few bytes a layer; each takes 512 bytes of the allocator."""
    normalizer: bool = False
    """Gemma keeps its embedding scale as a buffer."""
    per_expert_scale: bool = False
    """Gemma-4's router: a scale over the hidden size and one an expert."""
    extra: str = ""
    """A family with tensors of its own, by name (see memory.weight_extras)."""


@cache
def _rows() -> dict[str, dict[str, Any]]:
    document = read_data("anatomy.json")
    rows: dict[str, dict[str, Any]] = document["families"]
    return {**rows, **{alias: rows[name] for alias, name in document["aliases"].items()}}


@cache
def anatomy(model_type: str, architecture: str) -> Anatomy:
    """The anatomy of a family, by its architecture or else by the type of its language model."""
    rows = _rows()
    base = model_type.removesuffix("_text")
    for name in (architecture, model_type, base):
        if name in rows:
            return Anatomy(**rows[name])
    return Anatomy()
