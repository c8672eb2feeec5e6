"""PyTorch's caching allocator on one device: pools, best fit, splitting, expandable segments.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.cpp, PyTorch 2.4 to 2.13. An H200
answered the same requests with the same sizes (tests/memory/test_allocator.py). Garbage collection, blocks that another
stream still uses and the private pools of CUDA graphs are not modelled.

vLLM reports the weights as what torch has allocated, and torch counts whole blocks. A block is larger than its tensor
where the rest is too small to split off, or where splitting is off: 0.21+ loads models with `max_split_size_mb:20`."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

from legroom.records import dataclass, field
from legroom.units import MIB, cdiv, round_up

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: requests are rounded up to multiples of this."""
SMALL_REQUEST_BYTES = MIB
"""kSmallSize: requests up to this size are served from the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer: the segment size of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""kLargeBuffer: the segment size for requests below kMinLargeAlloc, and the slack of an unsplit block."""
_ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 20
"""Address space of one expandable segment: 20 TiB, more than any card has, in whole pages."""


class CudaOutOfMemory(Exception):
    """CUDA out of memory."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF before 2.9): the options that decide which block serves a request."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    """None: blocks of any size may be split."""
    power2_divisions: int = 0
    """`roundup_power2_divisions`: requests are rounded up to this many steps between powers of two; 0: off."""

    def rounded(self, request_bytes: int) -> int:
        """The bytes of the block that serves a request, rounded as torch does."""
        divisions = self.power2_divisions
        if divisions > 1 and request_bytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << (request_bytes.bit_length() - 1)
            return floor + round_up(request_bytes - floor, max(floor // divisions, 1))
        return -(-request_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES

    def may_split(self, block_bytes: int, wanted_bytes: int, *, is_small: bool) -> bool:
        """Whether a free block that serves a request is split, its rest kept free; `is_small`: in the small pool."""
        rest = block_bytes - wanted_bytes
        if is_small or self.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_REQUEST_BYTES and (self.max_split_bytes is None or wanted_bytes < self.max_split_bytes)

    def may_serve(self, block_bytes: int, wanted_bytes: int) -> bool:
        """Whether `max_split_size_mb` lets a free block that is large enough serve a request of `wanted_bytes`."""
        limit = self.max_split_bytes
        if limit is None:
            return True
        return block_bytes < (limit if wanted_bytes < limit else wanted_bytes + LARGE_SEGMENT_BYTES)

    def as_text(self) -> str:
        """The value of PYTORCH_ALLOC_CONF; empty for the defaults."""
        words = ["expandable_segments:True"] if self.expandable_segments else []
        words += [f"max_split_size_mb:{self.max_split_bytes // MIB}"] if self.max_split_bytes is not None else []
        words += [f"roundup_power2_divisions:{self.power2_divisions}"] if self.power2_divisions else []
        return ",".join(words)


def parse_allocator_settings(text: str) -> AllocatorSettings:
    """PYTORCH_ALLOC_CONF parsed; options that move no block and unreadable values are skipped."""
    values = dict(part.partition(":")[::2] for part in text.replace(" ", "").split(",") if ":" in part)
    split, divisions = values.get("max_split_size_mb", ""), values.get("roundup_power2_divisions", "")
    is_expandable = values.get("expandable_segments", "").lower() == "true"
    max_split_bytes = int(split) * MIB if split.isdigit() else None
    return AllocatorSettings(is_expandable, max_split_bytes, int(divisions) if divisions.isdigit() else 0)


def segment_bytes(block_bytes: int) -> int:
    """Bytes that cudaMalloc is asked for when no free block serves a request of this rounded size."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < 10 * MIB:  # kMinLargeAlloc
        return LARGE_SEGMENT_BYTES
    return round_up(block_bytes, 2 * MIB)  # kRoundLarge


class Block:
    """A piece of a segment: allocated, free, or unmapped address space of an expandable segment."""

    __slots__ = ("address", "after", "before", "is_allocated", "is_mapped", "pool", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: BlockPool, is_mapped: bool = True) -> None:
        self.address, self.size_bytes, self.pool, self.is_mapped = address, size_bytes, pool, is_mapped
        self.is_allocated = False
        self.before: Block | None = None
        self.after: Block | None = None

    def link(self, before: Block | None, after: Block | None) -> None:
        """Set the blocks before and after this one in its segment."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self

    def merge_neighbours(self) -> None:
        """Absorbs adjacent free blocks that are mapped (or unmapped) as this block is, which is on no free list."""
        for other in (self.before, self.after):
            if other is None or other.is_allocated or other.is_mapped != self.is_mapped:
                continue
            other.pool.remove(other)
            self.size_bytes += other.size_bytes
            if other is self.before:
                self.address = other.address
                self.link(other.before, self.after)
            else:
                self.link(self.before, other.after)


@dataclass(slots=True, eq=False)
class BlockPool:
    """The free blocks of one stream and one size class, the smallest first."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    segments: dict[int, int] = field(default_factory=dict)
    """Bytes of every reserved segment, by address; an expandable segment is not listed."""

    def add(self, block: Block) -> None:
        """Lists a free block for reuse, or its address range as unmapped."""
        if block.is_mapped:
            insort(self.free, (block.size_bytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Takes the block off the free (or unmapped) list."""
        # Size and address are unique, so blocks themselves are never compared.
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    @property
    def page_bytes(self) -> int:
        """Bytes by which an expandable segment of this pool grows: 2 MiB or 20 MiB."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES


@dataclass(slots=True, eq=False)
class CachingAllocator:
    """The allocator of one process on one device. `limit_bytes`: the process's memory fraction; `card_bytes`: the free
    memory of the card; None: no limit."""

    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    limit_bytes: int | None = None
    card_bytes: int | None = None
    ascending_addresses: bool = False
    """The order in which segments get addresses, which decides between free blocks of one size. Recorded requests agree
    with descending addresses, recorded weights with ascending ones."""
    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    reserved_bytes: int = 0
    retries: int = 0
    """num_alloc_retries: how often the cache was emptied to serve a request."""
    _pools: dict[tuple[int, bool], BlockPool] = field(default_factory=dict)
    _next_address: int = 1 << 60
    _expandable: count[int] = field(default_factory=lambda: count(_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    """Start addresses of expandable segments."""

    def allocate(self, request_bytes: int, stream: int = 0) -> Block:
        """The block that serves a request on a CUDA stream (by number); raises CudaOutOfMemory."""
        wanted = self.settings.rounded(request_bytes)
        is_small = wanted <= SMALL_REQUEST_BYTES
        pool = self._pools.get((stream, is_small)) or self._pools.setdefault((stream, is_small), BlockPool(is_small))
        block = self._best_fit(pool, wanted) or self._reserve(pool, wanted)
        if block.size_bytes > wanted and self.settings.may_split(block.size_bytes, wanted, is_small=is_small):
            self._split(block, wanted)
        block.is_allocated = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Returns the block to its pool, merged with free neighbours; the segment stays reserved."""
        self.allocated_bytes -= block.size_bytes
        block.is_allocated = False
        block.merge_neighbours()
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return every fully free segment to the driver, and every free page of expandable segments."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._release(block)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Bytes of every free block."""
        return tuple(size for pool in self._pools.values() for size, _, _ in pool.free)

    @property
    def large_segments(self) -> list[int]:
        """Bytes of every reserved segment of the large pools."""
        return [size for pool in self._pools.values() if not pool.is_small for size in pool.segments.values()]

    @property
    def used_segments(self) -> list[int]:
        """Bytes of every segment with an allocated block, as if the small blocks were packed without gaps."""
        used: list[int] = []
        small_bytes = 0
        for pool in self._pools.values():
            if pool.is_small:
                small_bytes += sum(pool.segments.values()) - sum(size for size, _, _ in pool.free)
                continue
            empty = {address for size, address, _ in pool.free if pool.segments.get(address) == size}
            used += [size for address, size in pool.segments.items() if address not in empty]
        return used + [SMALL_SEGMENT_BYTES] * cdiv(small_bytes, SMALL_SEGMENT_BYTES)

    def _best_fit(self, pool: BlockPool, wanted_bytes: int) -> Block | None:
        """The smallest free block that may serve `wanted_bytes`, taken off the pool; None where there is none."""
        index = bisect_left(pool.free, (wanted_bytes,))
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        if self.settings.expandable_segments:
            # A block at the end of the segment counts with the address space that it could grow into.
            for _, _, larger in pool.free[index + 1 :]:
                if _growable_bytes(larger) >= _growable_bytes(block):
                    break
                block = larger
        if not self.settings.may_serve(block.size_bytes, wanted_bytes):
            return None
        pool.remove(block)
        return block

    def _reserve(self, pool: BlockPool, wanted_bytes: int) -> Block:
        """A block of `wanted_bytes` newly reserved, after emptying the cache if need be; raises CudaOutOfMemory."""
        block = self._grow(pool, wanted_bytes)
        if block is None and self._release_oversize(pool, wanted_bytes):
            block = self._grow(pool, wanted_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, wanted_bytes)
        if block is None:
            raise CudaOutOfMemory
        return block

    def _grow(self, pool: BlockPool, wanted_bytes: int) -> Block | None:
        """A block of `wanted_bytes` newly reserved; None where the allocator's limit or the card is exhausted."""
        size = segment_bytes(wanted_bytes)
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, wanted_bytes)
        if self.card_bytes is not None and self.reserved_bytes + size > self.card_bytes:
            return None
        address = self._next_address if self.ascending_addresses else self._next_address - size
        self._next_address = address + size if self.ascending_addresses else address
        self.reserved_bytes += size
        pool.segments[address] = size
        return Block(address, size, pool)

    def _release_oversize(self, pool: BlockPool, wanted_bytes: int) -> bool:
        """Releases free blocks of `max_split_size_mb` or more until `wanted_bytes` are released; whether they are."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        needed = max(limit, wanted_bytes)
        index = bisect_left(pool.free, (needed,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < needed and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= needed

    def _release(self, block: Block) -> None:
        """Gives the block's segment back to the driver: it is no longer reserved."""
        block.pool.remove(block)
        block.pool.segments.pop(block.address, None)
        self.reserved_bytes -= block.size_bytes

    def _split(self, block: Block, wanted_bytes: int) -> None:
        """Cut the block to `wanted_bytes`; the rest joins its pool, free, or unmapped where the block is."""
        rest = Block(block.address + wanted_bytes, block.size_bytes - wanted_bytes, block.pool, block.is_mapped)
        block.size_bytes = wanted_bytes
        rest.link(block, block.after)
        block.pool.add(rest)

    def _expand(self, pool: BlockPool, wanted_bytes: int) -> Block | None:
        """A block of `wanted_bytes` or more, mapped at the end of an expandable segment; None where mapping fails."""
        block = self._expandable_block(pool, wanted_bytes)
        if not block.is_mapped and not self._map(block, min(block.size_bytes, wanted_bytes)):
            return None
        while block.size_bytes < wanted_bytes:
            following = block.after
            assert following is not None
            if not self._map(following, min(wanted_bytes - block.size_bytes, following.size_bytes)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable_block(self, pool: BlockPool, wanted_bytes: int) -> Block:
        """The first free or unmapped block that starts a free run of `wanted_bytes`, else that of a new segment."""
        for _, unmapped in pool.unmapped:
            before = unmapped.before
            start = before if before is not None and not before.is_allocated else unmapped
            if _free_run_bytes(start, wanted_bytes) >= wanted_bytes:
                return start
        block = Block(next(self._expandable), _ADDRESS_SPACE_BYTES, pool, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, wanted_bytes: int) -> bool:
        """Maps the first `wanted_bytes` of an unmapped block, in whole pages; False where the card is full."""
        pool = block.pool
        mapped = min(round_up(wanted_bytes, pool.page_bytes), block.size_bytes)
        if self.card_bytes is not None and self.reserved_bytes + mapped > self.card_bytes:
            return False
        pool.remove(block)
        if mapped < block.size_bytes:
            self._split(block, mapped)
        block.is_mapped = True
        block.merge_neighbours()
        pool.add(block)
        self.reserved_bytes += mapped
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block; the edges stay mapped."""
        pool, page = block.pool, block.pool.page_bytes
        begin = round_up(block.address, page)
        end = (block.address + block.size_bytes) // page * page
        if end <= begin:
            return
        pool.remove(block)
        if end < block.address + block.size_bytes:
            self._split(block, end - block.address)
        if begin > block.address:
            left = Block(block.address, begin - block.address, pool)
            left.link(block.before, block)
            pool.add(left)
        block.address, block.size_bytes, block.is_mapped = begin, end - begin, False
        block.merge_neighbours()
        pool.add(block)
        self.reserved_bytes -= end - begin


def _growable_bytes(block: Block) -> int:
    """Bytes of the block and of the unmapped address space that follows it."""
    following = block.after
    return block.size_bytes + (following.size_bytes if following is not None and not following.is_mapped else 0)


def _free_run_bytes(block: Block | None, wanted_bytes: int) -> int:
    """Free and unmapped bytes in a row from this block on; counting stops once `wanted_bytes` are reached."""
    run = 0
    while run < wanted_bytes and block is not None and not block.is_allocated:
        run += block.size_bytes
        block = block.after
    return run
