"""KV cache specs: one frozen dataclass per kind of layer, with its page size and the blocks of a request. A spec
describes one layer on one rank: `token_bytes` includes tensor parallelism and the cache dtype. Tokens in flight and
speculative states are fields, so that `blocks` depends on the length alone."""

from dataclasses import replace
from typing import ClassVar

from legroom.records import dataclass
from legroom.units import cdiv, round_up


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of one layer, in blocks of `block_size` tokens."""

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""
    """The kind of layer as users read it."""
    type_name: ClassVar[str] = ""
    """Of a kind that needs the slots of another: its name."""
    type_fields: ClassVar[tuple[str, ...]] = ()
    """The parts of `type_key` beside the block size."""
    block_size: int

    @property
    def page_bytes(self) -> int:
        """page_size_bytes of vLLM's KVCacheSpec: one block of this layer."""
        raise NotImplementedError

    def blocks(self, length: int) -> int:
        """The most blocks that one request of `length` tokens ever holds in this layer."""
        raise NotImplementedError

    @property
    def bytes_of_token(self) -> int:
        """Bytes of this layer per token that it caches, on this rank; 0 for states of fixed size (Mamba)."""
        return 0

    @property
    def arithmetic_text(self) -> str:
        """How `bytes_of_token` is computed, as a phrase for `--explain-math`."""
        raise NotImplementedError

    @property
    def type_key(self) -> tuple[object, ...]:
        """A key that is equal for layers which need the same number of token slots, whatever their page size."""
        return (self.type_name or self.kind, *(getattr(self, name) for name in self.type_fields), self.block_size)

    @property
    def merge_key(self) -> "CacheSpec":
        """A key that is equal for layers which vLLM merges into one spec."""
        return self

    def with_block_size(self, block_size: int) -> "CacheSpec":
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
    """The page size after padding to another layer's page."""
    tokens_per_state: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one block: its tokens' keys and values, padded where another layer's page is larger."""
        unpadded = self.token_bytes * (self.block_size // self.tokens_per_state)
        return unpadded if self.padded_bytes is None else self.padded_bytes

    @property
    def bytes_of_token(self) -> int:
        """Bytes of one token's keys and values on this rank."""
        return self.token_bytes // self.tokens_per_state

    @property
    def kept_text(self) -> str:
        """The clause of `arithmetic_text` on which tokens are kept; empty where all are."""
        return ""

    @property
    def arithmetic_text(self) -> str:
        """How `token_bytes` is computed, such as `2 (keys and values) x 8 KV heads x 128 wide x 2 bytes`."""
        heads = f"{self.kv_heads} KV head{'s' if self.kv_heads > 1 else ''}"
        values = self.kv_heads * (self.head_dim + self.v_head_dim)
        size, rest = divmod(self.token_bytes, values) if values else (0, 1)
        if not size or rest:
            return f"{self.token_bytes:,} bytes of keys, values and scales for {heads}{self.kept_text}"
        if self.head_dim == self.v_head_dim:
            widths = f"2 (keys and values) x {heads} x {self.head_dim} wide"
        else:
            widths = f"{heads} x ({self.head_dim} wide keys + {self.v_head_dim} wide values)"
        return f"{widths} x {size} byte{'s' if size > 1 else ''}{self.kept_text}"


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Keeps every token. `window` and `chunk` are those of a layer that is promoted to full attention."""

    kind: ClassVar[str] = "full"
    title: ClassVar[str] = "full-attention"
    context_shards: int = 1
    window: int | None = None
    chunk: int | None = None

    def blocks(self, length: int) -> int:
        """Blocks of a request of `length` tokens on this rank; context-parallel ranks hold equal shares of them."""
        return cdiv(cdiv(length, self.context_shards), self.block_size)

    @property
    def merge_key(self) -> CacheSpec:
        """The spec without window and chunk, so that promoted layers merge with full ones."""
        return self if self.window is self.chunk is None else replace(self, window=None, chunk=None)


@dataclass(frozen=True, slots=True)
class LatentSpec(FullAttentionSpec):
    """Multi-head latent attention: one vector per `tokens_per_state` tokens, shared by all heads."""

    kind: ClassVar[str] = "mla"
    title: ClassVar[str] = "latent-attention (MLA)"
    type_name: ClassVar[str] = "full"
    role: str = "sparse"
    """`indexer` for the key cache of a sparse-attention indexer."""
    leads: bool = False
    """The layer has an indexer of its own (0.31+ separates them from layers that share one)."""

    @property
    def arithmetic_text(self) -> str:
        """The values and the bytes of a token's latent vector, as a phrase."""
        every = f", one for every {self.tokens_per_state} tokens" if self.tokens_per_state > 1 else ""
        return f"one vector of {self.head_dim} values shared by all heads, {self.token_bytes:,} bytes{every}"

    @property
    def merge_key(self) -> CacheSpec:
        """The spec itself: MLA layers merge only with equal ones."""
        return self


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Keeps the tokens of the window and of batches in flight."""

    kind: ClassVar[str] = "sliding"
    title: ClassVar[str] = "sliding-window"
    type_fields: ClassVar[tuple[str, ...]] = ("window",)
    window: int = 0
    in_flight_tokens: int = 0
    retained_tokens: int = 0
    """Kept below the window for multi-module speculation (0.28+)."""

    def blocks(self, length: int) -> int:
        """Blocks of the window and the tokens in flight, together at most `length` tokens, and one more."""
        # One block more than the tokens fill: the window may start inside a block.
        kept_tokens = self.window - 1 + self.retained_tokens + self.in_flight_tokens
        return cdiv(min(kept_tokens, length), self.block_size) + 1

    @property
    def kept_text(self) -> str:
        """The clause on how many tokens the window keeps."""
        return f"; only the last {self.window:,} tokens are kept"


@dataclass(frozen=True, slots=True)
class LatentWindowSpec(SlidingWindowSpec):
    """A sliding window over latent states (DeepSeek-V4)."""

    kind: ClassVar[str] = "sliding_mla"
    title: ClassVar[str] = "latent sliding-window"


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(AttentionSpec):
    """Attention within chunks (Llama 4)."""

    kind: ClassVar[str] = "chunked"
    title: ClassVar[str] = "chunked-attention"
    type_fields: ClassVar[tuple[str, ...]] = ("chunk",)
    chunk: int = 0
    in_flight_tokens: int = 0

    def blocks(self, length: int) -> int:
        """Blocks of one chunk and the tokens in flight, together at most `length` tokens."""
        return cdiv(min(self.chunk + self.in_flight_tokens, length), self.block_size)

    @property
    def kept_text(self) -> str:
        """The clause on how many tokens a chunk keeps."""
        return f"; only a chunk of {self.chunk:,} tokens is kept"


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """The encoder's states, kept for the decoder."""

    kind: ClassVar[str] = "cross"
    title: ClassVar[str] = "cross-attention"
    encoder_tokens: int = 0

    def blocks(self, length: int) -> int:
        """Blocks of the encoder's tokens, whatever the decoder's `length`."""
        return cdiv(self.encoder_tokens, self.block_size)


@dataclass(frozen=True, slots=True)
class StateSpec(CacheSpec):
    """The state of a recurrent layer, whose size does not depend on the length."""

    kind: ClassVar[str] = "state"
    title: ClassVar[str] = "recurrent-state"
    type_fields: ClassVar[tuple[str, ...]] = ("page_bytes", "request_blocks", "per_length")
    state_bytes: int
    request_blocks: int = 1
    """States per request; with `per_length` in addition to one per block of tokens."""
    per_length: bool = False
    padded_bytes: int | None = None
    state_kind: str = ""
    """States of different kinds are never merged, even of equal size."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one state, padded where another layer's page is larger."""
        return self.state_bytes if self.padded_bytes is None else self.padded_bytes

    def blocks(self, length: int) -> int:
        """Blocks of a request of `length` tokens: one per state, and one more per block of tokens with `per_length`."""
        return self.request_blocks + (cdiv(length, self.block_size) if self.per_length else 0)

    @property
    def arithmetic_text(self) -> str:
        """The bytes of a request's state, as a phrase."""
        return f"a state of {self.page_bytes:,} bytes for each request, whatever its length"


def align_page(token_bytes: int, tokens: int, alignment_bytes: int) -> int | None:
    """Bytes of a page of `tokens`, padded to a multiple of `alignment_bytes`; None where it already is one."""
    page = token_bytes * tokens
    padded = round_up(page, alignment_bytes)
    return padded if padded != page else None
