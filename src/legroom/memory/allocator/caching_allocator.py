"""PyTorch's caching allocator on one device, request by request: pools, best fit, splitting, expandable segments.

A block is a piece of a segment and knows its neighbours. Streams have blocks of their own. What is left out moves no
block on a server: garbage collection, blocks that another stream still uses, pools of CUDA graphs (a trace does not say
which requests were theirs).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from legroom.memory.allocator.settings import (
    LARGE_SEGMENT,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    AllocatorSettings,
    segment_bytes,
)
from legroom.records import dataclass, field

_ADDRESS_SPACE = LARGE_SEGMENT << 20
"""Of one expandable segment: 20 TiB, more than any card has, and a whole number of pages."""


class RequestRefused(Exception):
    """No memory for a request: CUDA out of memory."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A piece of a segment: allocated, free, or (in an expandable segment) address space without memory behind it."""

    address: int
    size_bytes: int
    pool: SegmentPool
    is_allocated: bool = False
    is_mapped: bool = True
    before: CachedBlock | None = None
    after: CachedBlock | None = None

    def has_neighbours(self) -> bool:
        return self.before is not None or self.after is not None


@dataclass(slots=True, eq=False)
class SegmentPool:
    """The free blocks of one stream and one class of sizes, the smallest first."""

    is_small: bool
    free: list[tuple[int, int, CachedBlock]] = field(default_factory=list)
    unmapped: list[tuple[int, CachedBlock]] = field(default_factory=list)

    def add(self, block: CachedBlock) -> None:
        if block.is_mapped:
            insort(self.free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: CachedBlock) -> None:
        # Size and address tell blocks apart, so blocks themselves are never compared.
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    @property
    def page_bytes(self) -> int:
        """What an expandable segment grows by."""
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT


@dataclass(slots=True, eq=False)
class CachingAllocator:
    """`limit_bytes`: what a process may reserve (a fraction of the card that was set); `card_bytes`: what the card has
    for it. None: more than it will ask for."""

    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    limit_bytes: int | None = None
    card_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    retries: int = 0
    """How often all free segments went back to the card so that a request could be served."""
    _pools: dict[tuple[int, bool], SegmentPool] = field(default_factory=dict)
    _next_address: int = 1 << 60
    _spaces: int = 0

    def allocate(self, request_bytes: int, stream: int = 0) -> CachedBlock:
        """The block that serves a request; RequestRefused where none can."""
        wanted = self.settings.rounded(request_bytes)
        pool = self._pool(stream, wanted <= SMALL_REQUEST)
        block = self._best_fit(pool, wanted) or self._new_memory(pool, wanted)
        if self.settings.may_split(block.size_bytes, wanted, is_small=pool.is_small):
            self._split(block, wanted)
        block.is_allocated = True
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: CachedBlock) -> None:
        self.allocated_bytes -= block.size_bytes
        block.is_allocated = False
        _join(block, block.before)
        _join(block, block.after)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back every segment without an allocated block, and every free page of expandable segments."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.has_neighbours():
                    self._release(block)

    @property
    def largest_free_bytes(self) -> int:
        return max((pool.free[-1][0] for pool in self._pools.values() if pool.free), default=0)

    def _pool(self, stream: int, is_small: bool) -> SegmentPool:
        return self._pools.setdefault((stream, is_small), SegmentPool(is_small))

    def _best_fit(self, pool: SegmentPool, wanted: int) -> CachedBlock | None:
        index = bisect_left(pool.free, (wanted,))
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        if self.settings.expandable_segments:
            # A block at the end of the segment counts as large as it could grow.
            for _, _, larger in pool.free[index + 1 :]:
                if _room(larger) >= _room(block):
                    break
                block = larger
        if not self.settings.may_serve(block.size_bytes, wanted):
            return None
        pool.remove(block)
        return block

    def _new_memory(self, pool: SegmentPool, wanted: int) -> CachedBlock:
        block = self._grow(pool, wanted)
        if block is None and self._release_oversize(pool, wanted):
            block = self._grow(pool, wanted)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, wanted)
        if block is None:
            raise RequestRefused
        return block

    def _grow(self, pool: SegmentPool, wanted: int) -> CachedBlock | None:
        size = segment_bytes(wanted)
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, wanted)
        if self.card_bytes is not None and self.reserved_bytes + size > self.card_bytes:
            return None
        self._next_address -= size  # the driver hands addresses out downwards
        self.reserved_bytes += size
        return CachedBlock(self._next_address, size, pool)

    def _release_oversize(self, pool: SegmentPool, wanted: int) -> bool:
        """With `max_split_size_mb`, blocks above it are given back first: the smallest that suffices, or several."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        needed = max(limit, wanted)
        index = bisect_left(pool.free, (needed,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < needed and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= needed

    def _release(self, block: CachedBlock) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _split(self, block: CachedBlock, wanted: int) -> None:
        rest = CachedBlock(block.address + wanted, block.size_bytes - wanted, block.pool)
        block.size_bytes = wanted
        _link(rest, block, block.after)
        block.pool.add(rest)

    def _expand(self, pool: SegmentPool, wanted: int) -> CachedBlock | None:
        block = self._expandable(pool, wanted)
        if not block.is_mapped and not self._map(block, min(block.size_bytes, wanted)):
            return None
        while block.size_bytes < wanted:
            following = block.after
            assert following is not None
            if not self._map(following, min(wanted - block.size_bytes, following.size_bytes)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable(self, pool: SegmentPool, wanted: int) -> CachedBlock:
        """The first free or unmapped block from which enough address space follows."""
        for _, unmapped in pool.unmapped:
            before = unmapped.before
            start = before if before is not None and not before.is_allocated else unmapped
            if _space(start, wanted) >= wanted:
                return start
        self._spaces += 1
        block = CachedBlock(self._spaces * _ADDRESS_SPACE, _ADDRESS_SPACE, pool, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: CachedBlock, size: int) -> bool:
        """Put memory behind the beginning of a block of address space, in whole pages."""
        pool, page = block.pool, block.pool.page_bytes
        taken = min(-(-size // page) * page, block.size_bytes)
        if self.card_bytes is not None and self.reserved_bytes + taken > self.card_bytes:
            return False
        pool.remove(block)
        block.is_mapped = True
        if taken < block.size_bytes:
            rest = CachedBlock(block.address + taken, block.size_bytes - taken, pool, is_mapped=False)
            block.size_bytes = taken
            _link(rest, block, block.after)
            pool.add(rest)
        _join(block, block.before)
        _join(block, block.after)
        pool.add(block)
        self.reserved_bytes += taken
        return True

    def _unmap(self, block: CachedBlock) -> None:
        """Take the memory from the whole pages of a free block; what lies beside them stays."""
        pool, page = block.pool, block.pool.page_bytes
        begin = -(-block.address // page) * page
        end = (block.address + block.size_bytes) // page * page
        if end <= begin:
            return
        pool.remove(block)
        if begin > block.address:
            left = CachedBlock(block.address, begin - block.address, pool)
            _link(left, block.before, block)
            pool.add(left)
        if end < block.address + block.size_bytes:
            right = CachedBlock(end, block.address + block.size_bytes - end, pool)
            _link(right, block, block.after)
            pool.add(right)
        block.address, block.size_bytes, block.is_mapped = begin, end - begin, False
        _join(block, block.before)
        _join(block, block.after)
        pool.add(block)
        self.reserved_bytes -= end - begin


def _link(block: CachedBlock, before: CachedBlock | None, after: CachedBlock | None) -> None:
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block


def _join(block: CachedBlock, other: CachedBlock | None) -> None:
    """Take a free neighbour of the same kind into a block that is in no list itself."""
    if other is None or other.is_allocated or other.is_mapped != block.is_mapped:
        return
    other.pool.remove(other)
    block.size_bytes += other.size_bytes
    if other is block.before:
        block.address = other.address
        _link(block, other.before, block.after)
    else:
        _link(block, block.before, other.after)


def _room(block: CachedBlock) -> int:
    following = block.after
    return block.size_bytes + (following.size_bytes if following is not None and not following.is_mapped else 0)


def _space(block: CachedBlock | None, wanted: int) -> int:
    space = 0
    while space < wanted and block is not None and not block.is_allocated:
        space += block.size_bytes
        block = block.after
    return space
