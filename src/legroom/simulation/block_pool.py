"""Blocks of KV cache, the queue of free ones, and the pool that hands them out (vLLM 0.32)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BlockKey = tuple[int, int]
"""Group of layers, and the name of the content."""


class Block:
    """A page of KV cache. Without a key its content cannot be found again."""

    __slots__ = ("key", "number", "ref_count")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ref_count = 0
        self.key: BlockKey | None = None


class FreeQueue:
    """Free blocks in the order in which they will be reused. A cached block can be taken back out of the middle."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._queue: OrderedDict[int, Block] = OrderedDict((block.number, block) for block in blocks)

    def __len__(self) -> int:
        return len(self._queue)

    def pop(self) -> Block:
        return self._queue.popitem(last=False)[1]

    def remove(self, block: Block) -> None:
        del self._queue[block.number]

    def reuse_first(self, blocks: list[Block]) -> None:
        """Put `blocks` at the front, the first of them foremost."""
        for block in reversed(blocks):
            self._queue[block.number] = block
            self._queue.move_to_end(block.number, last=False)

    def reuse_last(self, blocks: list[Block]) -> None:
        """Put `blocks` at the back, in order."""
        for block in blocks:
            self._queue[block.number] = block


class BlockPool:
    """Every block of the GPU, and which content can be found in which of them."""

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        blocks = [Block(number) for number in range(num_blocks)]
        self.null_block = blocks[0]
        self.free_queue = FreeQueue(blocks[1:])
        self.enable_caching = enable_caching
        # Equal content may sit in several blocks: the one cached first is found first.
        self._cached: dict[BlockKey, dict[int, Block]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that a request can still be given, cached content included."""
        return len(self.free_queue)

    def find(self, key: BlockKey) -> Block | None:
        copies = self._cached.get(key)
        return next(iter(copies.values())) if copies else None

    def allocate(self, count: int) -> list[Block]:
        """Take `count` blocks from the front of the free queue; what was cached in them is gone."""
        taken = [self.free_queue.pop() for _ in range(count)]
        for block in taken:
            if block.key is not None:
                self._forget(block)
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more request reads these blocks: they leave the free queue if they stood there."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def cache(self, block: Block, key: BlockKey) -> None:
        """Make the content of a full block findable."""
        if block.key is None:
            block.key = key
            self._cached.setdefault(key, {})[block.number] = block

    def release(self, blocks: Iterable[Block]) -> None:
        """One request less reads these blocks, given in the order in which they should be reused.

        Since 0.27 a block without cached content goes to the front of the queue (its page is still warm), a cached
        one to the back (least recently used goes first).
        """
        blank: list[Block] = []
        cached: list[Block] = []
        for block in blocks:
            if block is self.null_block:
                continue
            block.ref_count -= 1
            if block.ref_count == 0:
                (cached if self.enable_caching and block.key is not None else blank).append(block)
        self.free_queue.reuse_first(blank)
        self.free_queue.reuse_last(cached)

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        copies = self._cached[block.key]
        del copies[block.number]
        if not copies:
            del self._cached[block.key]
        block.key = None
