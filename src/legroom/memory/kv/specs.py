"""One frozen dataclass a kind of KV cache: how large a page is, and how many blocks a request of some length holds.

A spec is of one layer on one rank: tensor parallelism and the cache precision are already in `token_bytes`. Numbers
that a release adds to the count (tokens in flight, speculative states) are fields, so that `blocks` needs the length
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from legroom.records import dataclass
from legroom.units import cdiv, round_up


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of one layer, in blocks of `block_size` tokens."""

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""
    """The kind of layer, for people to read."""
    block_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    def blocks(self, length: int) -> int:
        """Blocks that one request of `length` tokens holds at its fullest."""
        raise NotImplementedError

    @property
    def bytes_of_token(self) -> int:
        """What one more token costs in this layer while it is kept; 0 where the length costs nothing."""
        return 0

    @property
    def working(self) -> str:
        """How `bytes_of_token` comes about, in words."""
        raise NotImplementedError

    @property
    def type_key(self) -> tuple[object, ...]:
        """Layers with equal keys always need the same number of token slots, whatever their page size."""
        raise NotImplementedError

    @property
    def merge_key(self) -> CacheSpec:
        """Layers with equal keys have one and the same cache as far as the planner is concerned."""
        return self

    def with_block_size(self, block_size: int) -> CacheSpec:
        """The same cache in blocks of another size."""
        return replace(self, block_size=block_size)


@dataclass(frozen=True, slots=True)
class AttentionSpec(CacheSpec):
    """Keys and values of attention heads."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    token_bytes: int
    """Keys, values and scales of one token on this rank."""
    padded_bytes: int | None = None
    """A page made larger to match another layer's."""
    tokens_per_state: int = 1

    @property
    def unpadded_bytes(self) -> int:
        """The page before any padding."""
        return self.token_bytes * (self.block_size // self.tokens_per_state)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return self.unpadded_bytes if self.padded_bytes is None else self.padded_bytes

    @property
    def bytes_of_token(self) -> int:
        return self.token_bytes // self.tokens_per_state

    @property
    def working(self) -> str:
        return self.token_working

    @property
    def token_working(self) -> str:
        """The working of one token that is kept."""
        heads = f"{self.kv_heads} KV head{'s' if self.kv_heads > 1 else ''}"
        values = self.kv_heads * (self.head_dim + self.v_head_dim)
        size, rest = divmod(self.token_bytes, values) if values else (0, 1)
        if not size or rest:
            return f"{self.token_bytes:,} bytes of keys, values and scales for {heads}"
        if self.head_dim == self.v_head_dim:
            widths = f"2 (keys and values) x {heads} x {self.head_dim} wide"
        else:
            widths = f"{heads} x ({self.head_dim} wide keys + {self.v_head_dim} wide values)"
        return f"{widths} x {size} byte{'s' if size > 1 else ''}"

    def padded_to(self, page_bytes: int) -> AttentionSpec:
        """The same cache in larger pages."""
        return replace(self, padded_bytes=page_bytes)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Every token stays. `window` is remembered where a sliding layer is kept whole (hybrid manager off)."""

    kind: ClassVar[str] = "full"
    title: ClassVar[str] = "full-attention"
    context_shards: int = 1
    window: int | None = None
    chunk: int | None = None

    def blocks(self, length: int) -> int:
        """Blocks for all tokens; context parallelism splits the sequence, not the heads."""
        return cdiv(cdiv(length, self.context_shards), self.block_size)

    @property
    def type_key(self) -> tuple[object, ...]:
        """All full-attention layers hold the same tokens."""
        return ("full", self.block_size)

    @property
    def merge_key(self) -> CacheSpec:
        """A remembered window does not make another cache."""
        return replace(self, window=None, chunk=None)


@dataclass(frozen=True, slots=True)
class LatentSpec(FullAttentionSpec):
    """Multi-head latent attention: one vector a token (or one for `tokens_per_state` tokens), not split by heads."""

    kind: ClassVar[str] = "mla"
    title: ClassVar[str] = "latent-attention (MLA)"
    role: str = "sparse"
    """`indexer` for the key cache of a sparse-attention indexer."""
    leads: bool = False
    """Owns an indexer (0.31+ keeps such layers apart from those that borrow one)."""

    @property
    def working(self) -> str:
        every = f", one for every {self.tokens_per_state} tokens" if self.tokens_per_state > 1 else ""
        return f"one vector of {self.head_dim} values shared by all heads, {self.token_bytes:,} bytes{every}"

    @property
    def merge_key(self) -> CacheSpec:
        """Latent caches merge only with their equals."""
        return self


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Tokens outside the window are dropped, except those of batches still in flight."""

    kind: ClassVar[str] = "sliding"
    title: ClassVar[str] = "sliding-window"
    window: int = 0
    in_flight_tokens: int = 0
    retained_tokens: int = 0
    """Kept below the window for multi-module speculation (0.28+)."""

    def blocks(self, length: int) -> int:
        """One block more than the tokens fill: the window need not start at a block's edge."""
        kept_tokens = self.window - 1 + self.retained_tokens + self.in_flight_tokens
        return cdiv(min(kept_tokens, length), self.block_size) + 1

    @property
    def working(self) -> str:
        return f"{self.token_working}; only the last {self.window:,} tokens are kept"

    @property
    def type_key(self) -> tuple[object, ...]:
        """Windows of one size hold the same tokens."""
        return ("sliding", self.window, self.block_size)


@dataclass(frozen=True, slots=True)
class LatentWindowSpec(SlidingWindowSpec):
    """A sliding window over latent states (DeepSeek-V4)."""

    kind: ClassVar[str] = "sliding_mla"
    title: ClassVar[str] = "latent sliding-window"

    @property
    def type_key(self) -> tuple[object, ...]:
        """Windows of one size hold the same tokens."""
        return ("sliding_mla", self.window, self.block_size)


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(AttentionSpec):
    """Attention within chunks (Llama 4)."""

    kind: ClassVar[str] = "chunked"
    title: ClassVar[str] = "chunked-attention"
    chunk: int = 0
    in_flight_tokens: int = 0

    def blocks(self, length: int) -> int:
        """One chunk and what is in flight."""
        return cdiv(min(self.chunk + self.in_flight_tokens, length), self.block_size)

    @property
    def working(self) -> str:
        return f"{self.token_working}; only a chunk of {self.chunk:,} tokens is kept"

    @property
    def type_key(self) -> tuple[object, ...]:
        """Chunks of one size hold the same tokens."""
        return ("chunked", self.chunk, self.block_size)


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """The encoder's states, kept for the decoder."""

    kind: ClassVar[str] = "cross"
    title: ClassVar[str] = "cross-attention"
    encoder_tokens: int = 0

    def blocks(self, length: int) -> int:
        """The longest encoder input, whatever the decoder's length."""
        del length
        return cdiv(self.encoder_tokens, self.block_size)

    @property
    def type_key(self) -> tuple[object, ...]:
        """Cross attention is a type of its own."""
        return ("cross", self.block_size)


@dataclass(frozen=True, slots=True)
class StateSpec(CacheSpec):
    """The state of a recurrent layer: one size whatever the length."""

    kind: ClassVar[str] = "state"
    title: ClassVar[str] = "recurrent-state"
    state_bytes: int
    request_blocks: int = 1
    """States one request holds; with `per_length` these come on top of one a block of tokens."""
    per_length: bool = False
    padded_bytes: int | None = None
    state_kind: str = ""

    @property
    def page_bytes(self) -> int:
        """The state, padded to the attention page it shares the pool with."""
        return self.state_bytes if self.padded_bytes is None else self.padded_bytes

    def blocks(self, length: int) -> int:
        """States of one request."""
        return self.request_blocks + (cdiv(length, self.block_size) if self.per_length else 0)

    @property
    def working(self) -> str:
        return f"a state of {self.page_bytes:,} bytes for each request, whatever its length"

    @property
    def type_key(self) -> tuple[object, ...]:
        """States of one size are held alike."""
        return ("state", self.page_bytes, self.request_blocks, self.per_length, self.block_size)

    def padded_to(self, page_bytes: int) -> StateSpec:
        """The same state in a larger page."""
        return replace(self, padded_bytes=page_bytes)


def align_page(token_bytes: int, states: int, alignment: int) -> int | None:
    """The padded page of a cache whose kernel wants pages in multiples of `alignment`; None where none is needed."""
    page = token_bytes * states
    padded = round_up(page, alignment)
    return padded if padded != page else None
