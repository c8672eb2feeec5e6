"""How a layer mixes tokens: one dataclass a kind, which answers what others ask of a layer.

Adding a kind adds a class here, and one row in each table of memory that goes by kind: its caches (`memory.kv.layers`),
its tensors (`memory.weights.modules`) and its activations (`memory.activation.layers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

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

    @property
    def sees_everything(self) -> bool:
        """Every token attends to all before it."""
        return self.window is None and self.chunk is None

    @property
    def score_width(self) -> int:
        """Elements that a head multiplies for each pair of tokens: its key and its value."""
        return self.head_dim + self.v_head_dim

    @property
    def rope_width(self) -> int:
        """Elements of a head that positions rotate."""
        return 0 if self.cross else self.head_dim

    @property
    def rope_kind(self) -> str:
        """Which of the config's rope parameters apply."""
        return "sliding_attention" if self.window or self.chunk else "full_attention"


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
    rope_kind: ClassVar[str] = "latent"

    @property
    def sees_everything(self) -> bool:
        """Every token attends to all before it."""
        return self.window is None

    @property
    def latent_width(self) -> int:
        """Elements of the latent that is kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def score_width(self) -> int:
        """Elements that a head multiplies for each pair of tokens: its key and its value."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim

    @property
    def rope_width(self) -> int:
        """Elements of a head that positions rotate."""
        return self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A recurrent mixer with a state of one size whatever the length: Mamba, gated delta net, short conv."""

    kind: str
    """mamba1 | mamba2 | gdn | kda | lightning | short_conv"""
    config: tuple[tuple[str, int], ...]
    """The widths this kind needs, by name, hashable."""
    heads: ClassVar[int] = 0
    window: ClassVar[int | None] = None
    sees_everything: ClassVar[bool] = False
    score_width: ClassVar[int] = 0
    rope_width: ClassVar[int] = 0
    rope_kind: ClassVar[str] = ""

    def width(self, name: str) -> int:
        """One width by name."""
        return dict(self.config)[name]


Mixer = Attention | LatentAttention | StateSpace


def attending(mixers: Iterable[Mixer | None]) -> list[Attention | LatentAttention]:
    """Those with heads that attend to other tokens."""
    return [mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention)]


def latent(mixers: Iterable[Mixer | None]) -> list[LatentAttention]:
    """Those that keep a latent of each token instead of keys and values."""
    return [mixer for mixer in mixers if isinstance(mixer, LatentAttention)]


def with_kv_heads(mixers: Iterable[Mixer | None]) -> list[Attention]:
    """Those with heads of keys and values."""
    return [mixer for mixer in mixers if isinstance(mixer, Attention)]


def recurrent(mixers: Iterable[Mixer | None]) -> list[StateSpace]:
    """Those that keep a state of one size."""
    return [mixer for mixer in mixers if isinstance(mixer, StateSpace)]
