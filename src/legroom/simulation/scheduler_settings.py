"""The scheduler's settings."""

from dataclasses import dataclass
from typing import Literal

from legroom.errors import LegroomError
from legroom.units import cdiv

Policy = Literal["fcfs", "priority"]
Engine = Literal["V1", "V0"]

_MAX_BLOCK_SIZE = 1 << 24  # Larger than any context.


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one block table. `sliding_window` is None for full attention."""

    sliding_window: int | None = None
    fixed_blocks: int = 0
    """Above 0: blocks per request at any length (recurrent states, an encoder's output)."""
    block_size: int | None = None
    """Where it differs from the pool's."""


@dataclass(frozen=True)
class SchedulerSettings:
    """The scheduler's flags under vLLM's names, and the size of the block pool."""

    num_blocks: int
    """As vLLM's `num_gpu_blocks`: the null block is one of them."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: Policy = "fcfs"
    watermark: float = 0.0
    """Share of the pool kept free when a waiting request is admitted (0.32: 0; the V0 engine: 0.01)."""
    reserve_full_isl: bool = True
    """A waiting request is admitted only if its whole prompt fits, not just its first chunk."""
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    num_speculative_tokens: int = 0
    speculative_acceptance: float = 0.0
    """Share of draft tokens that the target model accepts."""
    draft_needs_kv: bool = True
    """Whether the drafter writes KV of its own past the scheduled tokens (EAGLE, MTP, a draft model; not n-gram)."""
    async_scheduling: bool = False
    """One batch in flight ahead, as on GPUs; False: the synchronous scheduler."""
    engine: Engine = "V1"
    remote_prefill: bool = False
    """A decode server: the KV of every prompt but its last token comes from another server."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise LegroomError(f"{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 1")
        if self.block_size > _MAX_BLOCK_SIZE:
            raise LegroomError(f"block-size is {self.block_size}, but must be at most {_MAX_BLOCK_SIZE:,}")
        if self.num_speculative_tokens < 0:
            raise LegroomError(f"num-speculative-tokens is {self.num_speculative_tokens}, but must be at least 0")
        if self.num_blocks < 2:
            hint = "vLLM keeps one block back (the null block): give at least 2"
            raise LegroomError(f"a pool of {self.num_blocks} blocks holds nothing", hint)
        if self.max_num_batched_tokens < self.max_num_seqs:
            why = f"max-num-batched-tokens ({self.max_num_batched_tokens}) is below max-num-seqs ({self.max_num_seqs})"
            raise LegroomError(why, "vLLM refuses this: raise --max-num-batched-tokens or lower --max-num-seqs")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise LegroomError(
                f"without chunked prefill max-num-batched-tokens ({self.max_num_batched_tokens}) "
                f"must reach max-model-len ({self.max_model_len})",
                "vLLM refuses this: a prompt could never be scheduled",
            )
        if not 0 <= self.watermark < 1:
            raise LegroomError(f"watermark is {self.watermark}, but must be at least 0 and below 1")
        if not 0 <= self.speculative_acceptance <= 1:
            raise LegroomError(f"speculative acceptance is {self.speculative_acceptance}, but must be between 0 and 1")
        if self.enable_prefix_caching and any(group.fixed_blocks or group.block_size for group in self.groups):
            hint = "give --no-enable-prefix-caching"
            raise LegroomError("prefix caching over recurrent states or blocks of several sizes is not simulated", hint)
        if self.engine == "V0":
            self._check_v0()

    def _check_v0(self) -> None:
        """Raises LegroomError for a setting that the simulation of the V0 engine does not cover."""
        for is_set, what in (
            (self.enable_chunked_prefill, "chunked prefill"),
            (self.enable_prefix_caching, "prefix caching"),
            (self.scheduling_policy == "priority", "scheduling by priority"),
            (self.num_speculative_tokens > 0, "speculative tokens"),
            (self.async_scheduling, "asynchronous scheduling"),
            (self.groups != (LayerGroup(),), "groups of layers"),
        ):
            if is_set:
                hint = "leave it out, or plan a release with the V1 engine"
                raise LegroomError(f"{what} under the V0 engine is not simulated", hint)

    @property
    def usable_blocks(self) -> int:
        """Blocks of the pool that requests can use: without the null block, which V0 does not have."""
        return self.num_blocks if self.engine == "V0" else self.num_blocks - 1

    @property
    def watermark_blocks(self) -> int:
        """Free blocks that must remain after admitting a request (vLLM's watermark)."""
        return int(self.watermark * self.num_blocks)

    @property
    def lookahead_tokens(self) -> int:
        """Token slots reserved after the scheduled tokens for the KV cache of drafted tokens."""
        return self.num_speculative_tokens if self.draft_needs_kv else 0

    def max_blocks_of(self, prompt_len: int, output_len: int) -> int:
        """Blocks that a request holds when it ends; the KV of its last sampled token is never stored."""
        tokens = prompt_len + output_len - 1 + self.num_speculative_tokens + self.lookahead_tokens
        tokens = min(tokens, self.max_model_len)
        return sum(self.max_blocks_in(group, tokens) for group in self.groups)

    def max_blocks_in(self, group: LayerGroup, tokens: int) -> int:
        """The most blocks that a request of `tokens` tokens holds in one group of layers."""
        if group.fixed_blocks:
            return group.fixed_blocks
        block_size = group.block_size or self.block_size
        needed = cdiv(tokens, block_size)
        if group.sliding_window is None:
            return needed
        # The window, the tokens in flight, and one block for alignment.
        batches_in_flight = 2 if self.async_scheduling else 1
        most_tokens = group.sliding_window - 1 + batches_in_flight * self.max_num_batched_tokens
        return min(needed, cdiv(min(most_tokens, self.max_model_len), block_size) + 1)
