"""The blocks of each request: one manager per group of layers, and the prefix cache over all of them."""

import sys

from legroom.simulation.block_pool import Block, BlockPool
from legroom.simulation.request import Request, Status
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.units import cdiv

Hit = list[list[Block]]
"""Cached blocks of a request, per group."""


class FullAttentionManager:
    """Blocks of full-attention layers: every block is kept until the request ends."""

    def __init__(self, group: int, settings: SchedulerSettings, pool: BlockPool) -> None:
        self.group, self.layers, self.block_pool = group, settings.groups[group], pool
        self.block_size = self.layers.block_size or settings.block_size

    def num_skipped_tokens(self, num_computed: int) -> int:
        """How many of the first `num_computed` tokens no later token attends to: 0 with full attention."""
        return 0

    def should_cache(self, request: Request, index: int) -> bool:
        """Whether a later request could use the request's block `index` from the cache; always with full attention."""
        return True

    def find_longest_cache_hit(self, hashes: list[int], max_blocks: int, groups: list[int]) -> Hit:
        """Per group the cached blocks of the longest run of leading `hashes`, up to `max_blocks`, that all have."""
        hit: Hit = [[] for _ in groups]
        for block_hash in hashes[:max_blocks]:
            cached = [block for group in groups if (block := self.block_pool.get_cached_block((group, block_hash)))]
            if len(cached) < len(groups):
                break
            for blocks, block in zip(hit, cached, strict=True):
                blocks.append(block)
        return hit

    def num_blocks_to_allocate(self, request: Request, required: int, hit: list[Block], num_computed: int) -> int:
        """How many free blocks the request, with `num_computed` tokens, takes for `required` blocks, `hit` included."""
        num_held = len(request.blocks[self.group])
        skipped = self.num_skipped_tokens(num_computed) // self.block_size
        new = max(required - max(skipped, len(hit) + num_held), 0)
        free_hit = hit[max(0, skipped - num_held) :]
        return new + sum(block.ref_count == 0 and block is not self.block_pool.null_block for block in free_hit)

    def hold_cached_blocks(self, request: Request, hit: list[Block], num_computed: int) -> None:
        """Begins the block table with the `hit` blocks; those before the window at `num_computed` tokens are null."""
        skipped = self.num_skipped_tokens(num_computed) // self.block_size
        kept = hit[skipped:]
        self.block_pool.touch(kept)
        request.blocks[self.group] = [*[self.block_pool.null_block] * skipped, *kept]
        request.num_cached_blocks[self.group] = len(request.blocks[self.group])

    def allocate_new_blocks(self, request: Request, num_tokens: int) -> None:
        """Extends the request's block table until it holds `num_tokens`."""
        blocks = request.blocks[self.group]
        blocks.extend(self.block_pool.get_new_blocks(max(0, cdiv(num_tokens, self.block_size) - len(blocks))))

    def remove_skipped_blocks(self, request: Request, num_computed: int) -> None:
        """Frees blocks that lie before the window at `num_computed` tokens; null blocks take their place."""
        blocks = request.blocks[self.group]
        end = min(self.num_skipped_tokens(num_computed) // self.block_size, len(blocks))
        dropped: list[Block] = []
        for index in range(end - 1, -1, -1):
            block = blocks[index]
            if block is self.block_pool.null_block:
                break
            dropped.append(block)
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(dropped)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks of the first `num_tokens` to the prefix cache."""
        first, full = request.num_cached_blocks[self.group], num_tokens // self.block_size
        for index in range(first, full):
            block = request.blocks[self.group][index]
            if block is not self.block_pool.null_block and self.should_cache(request, index):
                self.block_pool.cache_full_block(block, (self.group, request.block_hashes[index]))
        request.num_cached_blocks[self.group] = max(first, full)

    def stable_until_tokens(self, request: Request, num_computed: int) -> int:
        """The request's length up to which no block is allocated, freed or cached: its blocks' token slots."""
        return len(request.blocks[self.group]) * self.block_size

    def slots_and_tokens(self, request: Request) -> tuple[int, int]:
        """(Token slots of the blocks that the request holds, tokens stored in them)."""
        return len(request.blocks[self.group]) * self.block_size, request.num_computed_tokens

    def free(self, request: Request) -> None:
        """Free all blocks, the last one first: the start of a prompt is most likely shared."""
        self.block_pool.free_blocks(reversed(request.blocks[self.group]))
        request.blocks[self.group] = []
        request.num_cached_blocks[self.group] = 0


class SlidingWindowManager(FullAttentionManager):
    """Blocks of sliding-window layers: those behind the window are freed while the request runs."""

    def __init__(self, group: int, settings: SchedulerSettings, pool: BlockPool) -> None:
        super().__init__(group, settings, pool)
        self.sliding_window = self.layers.sliding_window or 0
        self.blocks_for_hit = cdiv(self.sliding_window - 1, self.block_size)

    def num_skipped_tokens(self, num_computed: int) -> int:
        """How many of the first `num_computed` tokens are before the window of the next token."""
        return max(0, num_computed - self.sliding_window + 1)

    def stable_until_tokens(self, request: Request, num_computed: int) -> int:
        """The request's length at which next a block is full or lies wholly before the window."""
        next_skipped = self.num_skipped_tokens(num_computed) // self.block_size + 1
        until_skipped = next_skipped * self.block_size + self.sliding_window - 2
        return min(super().stable_until_tokens(request, num_computed), until_skipped)

    def slots_and_tokens(self, request: Request) -> tuple[int, int]:
        """(token slots of the blocks that the request still holds, tokens in them), none before the window."""
        blocks, null = request.blocks[self.group], self.block_pool.null_block
        skipped = self.num_skipped_tokens(request.num_computed_tokens) // self.block_size
        dropped = min(skipped + 1, len(blocks))
        while dropped and blocks[dropped - 1] is not null:
            dropped -= 1
        return (len(blocks) - dropped) * self.block_size, request.num_computed_tokens - dropped * self.block_size

    def should_cache(self, request: Request, index: int) -> bool:
        """Whether the block is among the last of a prefix from which a later request could continue."""
        # 0.32 keeps two of them: before the prompt's last token (the same prompt again), and where another group found
        # a longer shared prefix.
        boundaries = (request.num_prompt_tokens - 1, request.shared_prefix_boundary)
        ends = [boundary // self.block_size for boundary in boundaries if boundary]
        return any(end - self.blocks_for_hit <= index < end for end in ends)

    def find_longest_cache_hit(self, hashes: list[int], max_blocks: int, groups: list[int]) -> Hit:
        """Per group the blocks of the longest prefix of `hashes` that ends in a cached window; null before that."""
        null = self.block_pool.null_block
        hit: Hit = [[null] * max_blocks for _ in groups]
        run = 0
        for index in range(max_blocks - 1, -1, -1):
            cached = [block for group in groups if (block := self.block_pool.get_cached_block((group, hashes[index])))]
            if len(cached) < len(groups):
                run = 0
                continue
            for blocks, block in zip(hit, cached, strict=True):
                blocks[index] = block
            run += 1
            if run >= self.blocks_for_hit:
                return [blocks[: index + run] for blocks in hit]
        return [blocks[:run] for blocks in hit]


class FixedSizeManager(FullAttentionManager):
    """Blocks of recurrent layers or of an encoder's output: the same number at any length."""

    def num_blocks_to_allocate(self, request: Request, required: int, hit: list[Block], num_computed: int) -> int:
        """The group's fixed number of blocks for a new request, 0 for one that already holds them."""
        return self.layers.fixed_blocks - len(request.blocks[self.group])

    def allocate_new_blocks(self, request: Request, num_tokens: int) -> None:
        """Hold the group's fixed number of blocks, whatever `num_tokens` is; nothing where they are held."""
        blocks = request.blocks[self.group]
        blocks.extend(self.block_pool.get_new_blocks(self.layers.fixed_blocks - len(blocks)))

    def stable_until_tokens(self, request: Request, num_computed: int) -> int:
        """sys.maxsize: the blocks stay the same at any length."""
        return sys.maxsize

    def slots_and_tokens(self, request: Request) -> tuple[int, int]:
        """(token slots, tokens stored in them), both 0: these blocks have no slots for single tokens."""
        return 0, 0


class KVCacheManager:
    """All groups of one model over one block pool."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.block_pool = BlockPool(settings.num_blocks)
        self.tables: list[FullAttentionManager] = []
        self._kinds: dict[int | None, list[int]] = {}
        for i, group in enumerate(settings.groups):
            manager = FullAttentionManager if group.sliding_window is None else SlidingWindowManager
            self.tables.append((FixedSizeManager if group.fixed_blocks else manager)(i, settings, self.block_pool))
            self._kinds.setdefault(group.sliding_window, []).append(i)

    def add_request(self, request: Request) -> None:
        """Give the request an empty block table for each group of layers."""
        request.blocks = [[] for _ in self.tables]
        request.num_cached_blocks = [0] * len(self.tables)

    def get_computed_blocks(self, request: Request) -> tuple[Hit, int]:
        """(cached blocks per group, tokens) of the longest prefix from which every group can continue the request."""
        if not self.settings.enable_prefix_caching:
            return [[] for _ in self.tables], 0
        block_size = self.settings.block_size
        # The last token is always computed: its logits are needed.
        length = (request.num_tokens - 1) // block_size
        hit: Hit = [[] for _ in self.tables]
        longest = 0
        kinds = sorted(self._kinds.values(), key=lambda kind: isinstance(self.tables[kind[0]], SlidingWindowManager))
        full = kinds[0] if not isinstance(self.tables[kinds[0][0]], SlidingWindowManager) else None
        full_hit = -1
        while True:
            current = length
            for kind in kinds:
                if kind is full and full_hit >= 0:
                    current = min(current, full_hit)
                    continue
                kind_hit = self.tables[kind[0]].find_longest_cache_hit(request.block_hashes, current, kind)
                current = len(kind_hit[0])
                if kind is full:
                    full_hit = current
                for group, blocks in zip(kind, kind_hit, strict=True):
                    hit[group] = blocks
                longest = max(longest, current)
            if current >= length:
                break
            length = current
            if len(kinds) == 1 or (len(kinds) == 2 and full is not None):
                break
        for group in full or ():
            del hit[group][length:]
        request.shared_prefix_boundary = longest * block_size if longest > length else 0
        return hit, length * block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit | None = None,
        num_hit_tokens: int = 0,
        *,
        num_loaded_tokens: int = 0,
        reserved_blocks: int = 0,
        full_prompt_must_fit: bool = False,
        has_running: bool = True,
    ) -> bool:
        """Allocates blocks for `num_new_tokens` after the `hit`; False if they and `reserved_blocks` do not fit."""
        # Blocks behind a window are freed either way; blocks of `num_loaded_tokens` are cached once they are loaded.
        settings = self.settings
        computed = min(request.num_computed_tokens + num_hit_tokens + num_loaded_tokens, settings.max_model_len)
        if hit is None and computed + num_new_tokens <= request.stable_until_tokens:
            return True
        is_admission = request.status is not Status.RUNNING
        watermark = settings.watermark_blocks if is_admission and has_running else 0
        if full_prompt_must_fit:
            full_tokens = min(request.num_tokens, settings.max_model_len)
            needed = self._num_blocks_to_allocate(request, full_tokens, hit, computed, True)
            if needed > self.block_pool.num_free_blocks - watermark:
                return False
        slots = min(computed + num_new_tokens + settings.lookahead_tokens, settings.max_model_len)
        for table in self.tables:
            table.remove_skipped_blocks(request, max(0, computed - request.in_flight_tokens))
        needed = self._num_blocks_to_allocate(request, slots, hit, computed, False)
        if needed > self.block_pool.num_free_blocks - reserved_blocks - watermark:
            return False
        if hit is not None and any(hit):
            for table, blocks in zip(self.tables, hit, strict=True):
                table.hold_cached_blocks(request, blocks, computed)
        for table in self.tables:
            table.allocate_new_blocks(request, slots)
        if num_loaded_tokens:
            return True
        if settings.enable_prefix_caching:
            # Draft tokens may be rejected: only certain tokens are cached.
            self.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        request.stable_until_tokens = self._stable_until_tokens(request, computed, computed + num_new_tokens)
        return True

    def _stable_until_tokens(self, request: Request, computed: int, num_tokens: int) -> int:
        """The request's length up to which no group changes its blocks, when `computed` of `num_tokens` have run."""
        block_size = self.settings.block_size
        if min(num_tokens, request.num_tokens) // block_size < num_tokens // block_size:
            return 0
        stable = (num_tokens // block_size + 1) * block_size - 1
        certain = max(0, computed - request.in_flight_tokens)
        for table in self.tables:
            stable = min(stable, table.stable_until_tokens(request, certain) - self.settings.lookahead_tokens)
        return stable

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks of the first `num_tokens` to the prefix cache, in every group."""
        for table in self.tables:
            table.cache_blocks(request, num_tokens)

    def slots_and_tokens(self, request: Request) -> tuple[int, int]:
        """(Token slots of the blocks that the request holds in all groups, tokens stored in them)."""
        slots = stored = 0
        for table in self.tables:
            group_slots, group_stored = table.slots_and_tokens(request)
            slots += group_slots
            stored += group_stored
        return slots, stored

    def free(self, request: Request) -> None:
        """Free the request's blocks in every group of layers."""
        request.stable_until_tokens = 0
        for table in self.tables:
            table.free(request)

    def _num_blocks_to_allocate(
        self, request: Request, num_tokens: int, hit: Hit | None, computed: int, in_chunks: bool
    ) -> int:
        """Free blocks of all groups that the request takes to hold `num_tokens`; `in_chunks`: computed in chunks, when
        a sliding window never holds all of their blocks at once."""
        needed = 0
        for i, (table, group) in enumerate(zip(self.tables, self.settings.groups, strict=True)):
            most = self.settings.max_blocks_in(group, num_tokens) if in_chunks else cdiv(num_tokens, table.block_size)
            needed += table.num_blocks_to_allocate(request, most, hit[i] if hit else [], computed)
        return needed
