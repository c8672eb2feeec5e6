"""How a layer mixes tokens: one dataclass a kind. Adding a kind adds a class here, a spec in `memory.kv`
and its tensors in `memory.weights`; nothing else asks which kind a layer is."""

from __future__ import annotations

from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head or grouped-query attention: full, sliding-window (`window`) or chunked-local (`chunk`)."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    shares_kv: bool = False
    """Reads the KV cache of an earlier layer and stores none (Gemma-3n, Gemma-4 E models)."""
    k_equals_v: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    causal: bool = True
    cross: bool = False
    index_head_dim: int = 0
    """> 0: block-sparse attention whose indexer keeps a key cache of its own (MiniMax-M3)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): one compressed latent a token, the same on every tensor-parallel rank."""

    heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_heads: int = 0
    index_head_dim: int = 0
    """> 0: DeepSeek sparse attention with an indexer that keeps its own key cache."""
    window: int | None = None
    compress_ratio: int = 0
    output_gate: bool = False
    o_groups: int = 0
    o_lora_rank: int = 0
    """> 0: the output projection is of low rank, one factor a group of heads (DeepSeek-V4)."""


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A recurrent mixer with a state of one size whatever the length: Mamba, gated delta net, short conv."""

    kind: str
    """mamba1 | mamba2 | gdn | kda | lightning | short_conv"""
    config: tuple[tuple[str, int], ...]
    """The widths this kind needs, by name, hashable."""

    def width(self, name: str) -> int:
        """One width by name."""
        return dict(self.config)[name]


Mixer = Attention | LatentAttention | StateSpace
