"""PyTorch's CUDA caching allocator, as far as it decides what "allocated" means: rounding, splitting, best fit.

vLLM reports the weights as what torch has allocated, and torch counts whole blocks. A block handed out is larger than
the tensor where the rest of it is too small to split off, or where splitting is forbidden: 0.21+ loads models with
`max_split_size_mb:20`, so that every block above 20 MiB is used whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from legroom.memory.allocator.settings import (
    SMALL_REQUEST,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    UNSPLIT_SLACK,
    segment_bytes,
)
from legroom.records import dataclass, field
from legroom.units import cdiv, round_up


class TensorBlock(NamedTuple):
    """A piece of a segment; `tensor_bytes` is what was asked for. A tuple, since a model has thousands of them."""

    size: int
    segment: int
    offset: int
    tensor_bytes: int = 0


@dataclass(slots=True)
class TorchAllocator:
    """The large pool of one device. `max_split_bytes` None: blocks of any size may be split."""

    max_split_bytes: int | None = None
    expandable: bool = False
    allocated_bytes: int = 0
    peak_bytes: int = 0
    """The most that was allocated at one time."""
    reserved_bytes: int = 0
    _free: list[tuple[int, int, int]] = field(default_factory=list)
    """(size, segment, offset), sorted: the best fit is the first that is large enough."""
    _lengths: list[int] = field(default_factory=list)
    """Of every segment of the large pool, in order."""
    _small_bytes: int = 0
    """Handed out of the small pool."""

    @property
    def segments(self) -> list[int]:
        """The bytes of every segment that still holds something, the small pool's last."""
        empty = {segment for size, segment, _ in self._free if size == self._lengths[segment - 1]}
        large = [length for number, length in enumerate(self._lengths, 1) if number not in empty]
        return large + [SMALL_SEGMENT] * cdiv(self._small_bytes, SMALL_SEGMENT)

    def allocate(self, tensor_bytes: int) -> TensorBlock:
        """Hand out a block for a tensor."""
        size = round_up(tensor_bytes, SMALLEST_BLOCK) or SMALLEST_BLOCK
        # A small tensor comes from 2 MiB segments that are split exactly, so only the rounding counts.
        if size <= SMALL_REQUEST or self.expandable:
            self._count(size)
            self._small_bytes += size
            return TensorBlock(size, -1, 0, tensor_bytes)
        place = self._best_fit(size) or self._new_segment(size)
        rest = place[0] - size
        if rest > SMALL_REQUEST and (self.max_split_bytes is None or size < self.max_split_bytes):
            insort(self._free, (rest, place[1], place[2] + size))
            place = (size, place[1], place[2])
        self._count(place[0])
        return TensorBlock(*place, tensor_bytes)

    def _count(self, size: int) -> None:
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, block: TensorBlock) -> None:
        """Take a block back, joined with the free blocks beside it."""
        self.allocated_bytes -= block.size
        if block.segment < 0:
            self._small_bytes -= block.size
            return
        size, start = block.size, block.offset
        # A block that is its whole segment has nothing beside it.
        beside = [b for b in self._free if b[1] == block.segment] if size < self._lengths[block.segment - 1] else ()
        for other in beside:
            if other[2] + other[0] == start:
                self._free.remove(other)
                size, start = size + other[0], other[2]
            elif start + size == other[2]:
                self._free.remove(other)
                size += other[0]
        insort(self._free, (size, block.segment, start))

    def _best_fit(self, size: int) -> tuple[int, int, int] | None:
        index = bisect_left(self._free, (size, -1, -1))
        if index == len(self._free):
            return None
        best, limit = self._free[index], self.max_split_bytes
        if limit is not None:
            if size < limit <= best[0]:
                return None
            if size >= limit and best[0] >= size + UNSPLIT_SLACK:
                return None
        return self._free.pop(index)

    def _new_segment(self, size: int) -> tuple[int, int, int]:
        length = segment_bytes(size)
        self._lengths.append(length)
        self.reserved_bytes += length
        return length, len(self._lengths), 0
