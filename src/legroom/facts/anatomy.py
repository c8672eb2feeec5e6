"""Norms, positions and other modules of a model family that its config omits. Data in `data/anatomy.json`."""

from collections.abc import Mapping
from typing import Any

from legroom.facts import family_rows, read_data
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The structure of a family that its config does not describe. The defaults are those of Llama."""

    norm: str = "rms"
    """rms: a weight | layer: a weight and a bias | none: no parameters"""
    norms: int = 2
    """Hidden-size norms of a layer."""
    expert_norms: int = 0
    """Further norms of a layer with experts."""
    final_norm: bool = True
    embeddings_on: str = "first"
    """Pipeline stages that hold the input embeddings: first | all (classes without a pipeline check)."""
    lm_head_on: str = "last"
    final_norm_on: str = "last"
    embedding_norm: bool = False
    qk_norm: str = ""
    """head: one head's width each | width: all heads, split over ranks | whole: all heads on every rank | per_head:
    a weight for every head of the rank | empty: none unless the attention says so, then `qk_norm_shape`"""
    qk_norm_shape: str = "head"
    qk_norm_bias: bool = False
    positions: str = ""
    """The config field with the number of learned positions."""
    positions_offset: int = 0
    causal_mask: bool = False
    """The Transformers library's code keeps a byte for every pair of positions."""
    tables_split: bool = False
    """Positions and token types are split over ranks like the vocabulary (BERT)."""
    token_types: str = ""
    whole_embeddings: bool = False
    """The vocabulary is neither padded nor split."""
    encoder_norms: int = 2
    """Norms of a layer of the encoder, in an encoder-decoder."""
    encoder_positions: str = ""
    mel_convolutions: bool = False
    """Two convolutions before the encoder (Whisper)."""
    lm_head_bias: bool = False
    lm_head: bool = True
    """False: no output layer at all (embedding models)."""
    rope: str = "rope"
    """rope | none | mrope"""
    rope_dtype: str = ""
    """Empty: the model's dtype."""
    rope_tables: int = 1
    """Tables of the same size with other parameters (an indexer's, a compressor's)."""
    rotary: float = 1.0
    """The rotated share of a head, where the config has none."""
    rope_layers: str = "all"
    """all: one rotary table | by_type: local and global layers have different bases."""
    attention_path: str = "self_attn"
    """The checkpoint's names of a layer's attention module, dense block and experts."""
    mlp_path: str = "mlp"
    moe_path: str = "mlp"
    scalars_per_layer: int = 0
    """Further buffers of a few bytes a layer; each takes 512 bytes of the allocator."""
    normalizer: bool = False
    """Gemma keeps its embedding scale as a buffer."""
    per_expert_scale: bool = False
    """Gemma-4's router: a scale over the hidden size and one an expert."""
    attention_gate: str = ""
    """A projection that gates the attention's output: width (all of it) | heads (one number a head)."""
    mamba_norm: bool = True
    mamba_input_norms: bool = False
    """Jamba normalizes dt, B and C."""


def adapts_embeddings_since(model_type: str) -> str | None:
    """The first release with LoRA buffers for this family's embeddings and logits; None where no release has them."""
    since: dict[str, str] = read_data("anatomy.json")["lora_embeddings"]["since"]
    return since.get(model_type.removesuffix("_text"))


def anatomy(model_type: str, architecture: str, config: Mapping[str, Any] | None = None) -> Anatomy:
    """The anatomy of a model family, found by the architecture's name, else by the language model's model type."""
    # `when` in a row: [config field, value, changes]; the last match wins.
    rows = family_rows("anatomy.json")
    base = model_type.removesuffix("_text")
    row = next((rows[name] for name in (architecture, model_type, base) if name in rows), None)
    if row is None:
        return Anatomy()
    plain = {key: value for key, value in row.items() if key != "when"}
    for field, value, changes in row.get("when", ()):
        if config is not None and config.get(field) == value:
            plain.update(changes)
    return Anatomy(**plain)
