"""Which blocks a request holds: one table a group of layers, and the prefix cache over all of them."""

from __future__ import annotations

import sys

from legroom.simulation.block_pool import Block, BlockPool
from legroom.simulation.request import Request, Status
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.units import cdiv

Hit = list[list[Block]]
"""The cached blocks found for a request, per group."""


class BlockTable:
    """The blocks of full-attention layers: every block is kept until the request ends."""

    def __init__(self, group: int, settings: SchedulerSettings, pool: BlockPool) -> None:
        self.group = group
        self.block_size = settings.groups[group].block_size or settings.block_size
        self.pool = pool

    def skipped_tokens(self, num_computed: int) -> int:
        """Tokens at the start that attention never reads again."""
        return 0

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks the request will hold at once when admission asks whether all of it fits."""
        return cdiv(num_tokens, self.block_size)

    def is_worth_caching(self, request: Request, index: int) -> bool:
        """Whether a later request could ever find this block useful."""
        return True

    def find_hit(self, hashes: list[int], max_blocks: int, groups: list[int]) -> Hit:
        """The longest run of cached blocks from the start, found in every one of `groups`."""
        hit: Hit = [[] for _ in groups]
        for name in hashes[:max_blocks]:
            cached = [self.pool.find((group, name)) for group in groups]
            if not all(cached):
                break
            for blocks, block in zip(hit, cached, strict=True):
                assert block is not None
                blocks.append(block)
        return hit

    def blocks_needed(self, request: Request, num_tokens: int, hit: list[Block], num_computed: int, whole: bool) -> int:
        """Free blocks that holding `num_tokens` would use up; a hit that stands in the free queue uses up itself."""
        required = self.most_blocks(num_tokens) if whole else cdiv(num_tokens, self.block_size)
        num_held = len(request.blocks[self.group])
        skipped = self.skipped_tokens(num_computed) // self.block_size
        new = max(required - max(skipped, len(hit) + num_held), 0)
        revived = hit[max(0, skipped - num_held) :]
        return new + sum(block.ref_count == 0 and block is not self.pool.null_block for block in revived)

    def adopt(self, request: Request, hit: list[Block], num_computed: int) -> None:
        """Hold the cached blocks; those behind the window are not needed."""
        skipped = self.skipped_tokens(num_computed) // self.block_size
        kept = hit[skipped:]
        self.pool.touch(kept)
        request.blocks[self.group] = [*[self.pool.null_block] * skipped, *kept]
        request.num_cached_blocks[self.group] = len(request.blocks[self.group])

    def grow(self, request: Request, num_tokens: int) -> None:
        """Hold enough blocks for `num_tokens`."""
        blocks = request.blocks[self.group]
        blocks.extend(self.pool.allocate(max(0, cdiv(num_tokens, self.block_size) - len(blocks))))

    def drop_skipped(self, request: Request, num_computed: int) -> None:
        """Give back the blocks behind the window."""
        blocks = request.blocks[self.group]
        end = min(self.skipped_tokens(num_computed) // self.block_size, len(blocks))
        dropped: list[Block] = []
        for index in range(end - 1, -1, -1):
            block = blocks[index]
            if block is self.pool.null_block:
                break
            assert isinstance(block, Block)
            dropped.append(block)
            blocks[index] = self.pool.null_block
        self.pool.release(dropped)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` findable."""
        first, full = request.num_cached_blocks[self.group], num_tokens // self.block_size
        for index in range(first, full):
            block = request.blocks[self.group][index]
            assert isinstance(block, Block)
            if block is not self.pool.null_block and self.is_worth_caching(request, index):
                self.pool.cache(block, (self.group, request.block_hashes[index]))
        request.num_cached_blocks[self.group] = max(first, full)

    def quiet_tokens(self, request: Request, behind: int) -> int:
        """The length up to which the table stays as it is; `behind` tokens are computed for certain."""
        return len(request.blocks[self.group]) * self.block_size

    def slots_of(self, request: Request) -> tuple[int, int]:
        """Slots the request holds, and the tokens stored in them."""
        return len(request.blocks[self.group]) * self.block_size, request.num_computed_tokens

    def free(self, request: Request) -> None:
        """Give everything back, the tail first: the start of a prompt is what others may share."""
        self.pool.release(reversed(request.blocks[self.group]))  # type: ignore[arg-type]
        request.blocks[self.group] = []
        request.num_cached_blocks[self.group] = 0


class WindowTable(BlockTable):
    """The blocks of sliding-window layers: those behind the window are given back while the request runs."""

    def __init__(self, group: int, settings: SchedulerSettings, pool: BlockPool, sliding_window: int) -> None:
        super().__init__(group, settings, pool)
        self.sliding_window = sliding_window
        self.run_for_hit = cdiv(sliding_window - 1, self.block_size)
        self.most_held = settings.window_blocks(settings.groups[group])

    def skipped_tokens(self, num_computed: int) -> int:
        """What lies behind the window of the next token."""
        return max(0, num_computed - self.sliding_window + 1)

    def quiet_tokens(self, request: Request, behind: int) -> int:
        """Until a block is full, or the window has left one."""
        left = self.skipped_tokens(behind) // self.block_size
        return min(super().quiet_tokens(request, behind), (left + 1) * self.block_size + self.sliding_window - 2)

    def slots_of(self, request: Request) -> tuple[int, int]:
        """As for full attention, less the blocks given back: all before the last one that was."""
        blocks, null = request.blocks[self.group], self.pool.null_block
        skipped = self.skipped_tokens(request.num_computed_tokens) // self.block_size
        dropped = min(skipped + 1, len(blocks))
        while dropped and blocks[dropped - 1] is not null:
            dropped -= 1
        return (len(blocks) - dropped) * self.block_size, request.num_computed_tokens - dropped * self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """Never more than a window and what is in flight."""
        return min(super().most_blocks(num_tokens), self.most_held)

    def is_worth_caching(self, request: Request, index: int) -> bool:
        """Whether the block lies in a window from which a later request can continue.

        0.32 keeps two of them: before the prompt's last token (the same prompt again), and where another group found a
        longer shared prefix.
        """
        boundaries = (request.num_prompt_tokens - 1, request.shared_prefix_boundary)
        ends = [boundary // self.block_size for boundary in boundaries if boundary]
        return any(end - self.run_for_hit <= index < end for end in ends)

    def find_hit(self, hashes: list[int], max_blocks: int, groups: list[int]) -> Hit:
        """The last window's worth of cached blocks: what lies before it may be missing."""
        null = self.pool.null_block
        hit: Hit = [[null] * max_blocks for _ in groups]
        run = 0
        for index in range(max_blocks - 1, -1, -1):
            cached = [self.pool.find((group, hashes[index])) for group in groups]
            if not all(cached):
                run = 0
                continue
            for blocks, block in zip(hit, cached, strict=True):
                assert block is not None
                blocks[index] = block
            run += 1
            if run >= self.run_for_hit:
                return [blocks[: index + run] for blocks in hit]
        return [blocks[:run] for blocks in hit]


class FixedTable(BlockTable):
    """The blocks of recurrent layers or of an encoder's output: the same number whatever the length."""

    def __init__(self, group: int, settings: SchedulerSettings, pool: BlockPool, num_blocks: int) -> None:
        super().__init__(group, settings, pool)
        self.num_blocks = num_blocks

    def blocks_needed(self, request: Request, num_tokens: int, hit: list[Block], num_computed: int, whole: bool) -> int:
        """All of them at the start, none later."""
        return self.num_blocks - len(request.blocks[self.group])

    def grow(self, request: Request, num_tokens: int) -> None:
        """Hold all of them from the first token on."""
        blocks = request.blocks[self.group]
        blocks.extend(self.pool.allocate(self.num_blocks - len(blocks)))

    def quiet_tokens(self, request: Request, behind: int) -> int:
        """For ever."""
        return sys.maxsize

    def slots_of(self, request: Request) -> tuple[int, int]:
        """A state is no slot for tokens."""
        return 0, 0


class KvCache:
    """All groups of one model over one pool."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks, settings.enable_prefix_caching)
        self.tables = [self._table(i, group) for i, group in enumerate(settings.groups)]
        self._kinds: dict[int | None, list[int]] = {}
        for i, group in enumerate(settings.groups):
            self._kinds.setdefault(group.sliding_window, []).append(i)

    def _table(self, index: int, group: LayerGroup) -> BlockTable:
        if group.fixed_blocks:
            return FixedTable(index, self.settings, self.pool, group.fixed_blocks)
        if group.sliding_window is not None:
            return WindowTable(index, self.settings, self.pool, group.sliding_window)
        return BlockTable(index, self.settings, self.pool)

    def admit(self, request: Request) -> None:
        request.blocks = [[] for _ in self.tables]
        request.num_cached_blocks = [0] * len(self.tables)

    def find_hit(self, request: Request) -> tuple[Hit, int]:
        """The longest cached prefix that every group can continue from, and its tokens."""
        if not self.settings.enable_prefix_caching:
            return [[] for _ in self.tables], 0
        block_size = self.settings.block_size
        # The last token is always computed: its logits are wanted.
        length = (request.num_tokens - 1) // block_size
        hit: Hit = [[] for _ in self.tables]
        longest = 0
        kinds = sorted(self._kinds.values(), key=lambda kind: isinstance(self.tables[kind[0]], WindowTable))
        full = kinds[0] if not isinstance(self.tables[kinds[0][0]], WindowTable) else None
        known_full = -1
        while True:
            current = length
            for kind in kinds:
                if kind is full and known_full >= 0:
                    current = min(current, known_full)
                    continue
                kind_hit = self.tables[kind[0]].find_hit(request.block_hashes, current, kind)
                current = len(kind_hit[0])
                if kind is full:
                    known_full = current
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

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit | None = None,
        num_hit_tokens: int = 0,
        *,
        num_loaded_tokens: int = 0,
        reserved_blocks: int = 0,
        whole_must_fit: bool = False,
        others_run: bool = True,
    ) -> bool:
        """Hold slots for `num_new_tokens` more; False if the pool has too few free blocks.

        Blocks behind a window are given back either way. `num_loaded_tokens` come from another tier: their blocks can
        be found only once they are there. `reserved_blocks` must stay free.
        """
        settings = self.settings
        computed = min(request.num_computed_tokens + num_hit_tokens + num_loaded_tokens, settings.max_model_len)
        if hit is None and computed + num_new_tokens <= request.quiet_tokens:
            return True
        is_admission = request.status is not Status.RUNNING
        reserve = settings.watermark_blocks if is_admission and others_run else 0
        if whole_must_fit:
            whole = min(request.num_tokens, settings.max_model_len)
            if self._blocks_needed(request, whole, hit, computed, True) + reserve > self.pool.num_free:
                return False
        slots = min(computed + num_new_tokens + settings.lookahead_tokens, settings.max_model_len)
        for table in self.tables:
            table.drop_skipped(request, max(0, computed - request.in_flight_tokens))
        if self._blocks_needed(request, slots, hit, computed, False) + reserve > self.pool.num_free - reserved_blocks:
            return False
        if hit is not None and any(hit):
            for table, blocks in zip(self.tables, hit, strict=True):
                table.adopt(request, blocks, computed)
        for table in self.tables:
            table.grow(request, slots)
        if num_loaded_tokens:
            return True
        if settings.enable_prefix_caching:
            # Draft tokens may be rejected: only tokens that are known for certain are cached.
            self.cache(request, min(computed + num_new_tokens, request.num_tokens))
        request.quiet_tokens = self._quiet_tokens(request, computed, computed + num_new_tokens)
        return True

    def _quiet_tokens(self, request: Request, computed: int, num_tokens: int) -> int:
        """How long the request may grow until a block is taken, given back or cached: until then nothing is decided."""
        block_size = self.settings.block_size
        if min(num_tokens, request.num_tokens) // block_size < num_tokens // block_size:
            return 0
        quiet = (num_tokens // block_size + 1) * block_size - 1
        behind = max(0, computed - request.in_flight_tokens)
        for table in self.tables:
            quiet = min(quiet, table.quiet_tokens(request, behind) - self.settings.lookahead_tokens)
        return quiet

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` findable in every group."""
        for table in self.tables:
            table.cache(request, num_tokens)

    def slots_of(self, request: Request) -> tuple[int, int]:
        """Slots the request holds, and the tokens stored in them."""
        slots = stored = 0
        for table in self.tables:
            more_held, more_stored = table.slots_of(request)
            slots += more_held
            stored += more_stored
        return slots, stored

    def free(self, request: Request) -> None:
        request.quiet_tokens = 0
        for table in self.tables:
            table.free(request)

    def _blocks_needed(self, request: Request, num_tokens: int, hit: Hit | None, computed: int, whole: bool) -> int:
        return sum(
            table.blocks_needed(request, num_tokens, hit[i] if hit else [], computed, whole)
            for i, table in enumerate(self.tables)
        )
