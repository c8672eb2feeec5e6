"""Blocks of KV cache, the queue of free ones, and the pool that allocates them (vLLM 0.32)."""

from collections import OrderedDict
from collections.abc import Iterable

BlockKey = tuple[int, int]
"""KV cache group, and the hash of the content."""


class Block:
    """A block of KV cache; `key` is set while its content can be found in the prefix cache."""

    __slots__ = ("block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None


class BlockPool:
    """All blocks of the GPU, and the prefix cache over them."""

    def __init__(self, num_blocks: int) -> None:
        blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = blocks[0]
        # Free blocks in the order of reuse.
        self._free = OrderedDict((block.block_id, block) for block in blocks[1:])
        # Several blocks may hold equal content: the one cached first is found first.
        self._cached: dict[BlockKey, dict[int, Block]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    def get_cached_block(self, key: BlockKey) -> Block | None:
        """A block with these contents, in use or free; None where none is cached."""
        copies = self._cached.get(key)
        return next(iter(copies.values())) if copies else None

    def get_new_blocks(self, count: int) -> list[Block]:
        """Takes `count` blocks from the front of the free queue; what was cached in them is evicted."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if block.key is not None:
                copies = self._cached[block.key]
                del copies[block.block_id]
                if not copies:
                    del self._cached[block.key]
                block.key = None
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to these blocks, which takes unreferenced ones off the free queue."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                del self._free[block.block_id]
            block.ref_count += 1

    def cache_full_block(self, block: Block, key: BlockKey) -> None:
        """Add a full block to the prefix cache, unless it is there already."""
        if block.key is None:
            block.key = key
            self._cached.setdefault(key, {})[block.block_id] = block

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        """Drops one reference to each block; those without any are free, to be reused in the given order."""
        # Since 0.27 a block without cached content goes to the front of the queue, a cached one to the back (least
        # recently used goes first).
        uncached: list[Block] = []
        for block in blocks:
            if block is self.null_block:
                continue
            block.ref_count -= 1
            if block.ref_count == 0 and block.key is not None:
                self._free[block.block_id] = block
            elif block.ref_count == 0:
                uncached.append(block)
        for block in reversed(uncached):
            self._free[block.block_id] = block
            self._free.move_to_end(block.block_id, last=False)
