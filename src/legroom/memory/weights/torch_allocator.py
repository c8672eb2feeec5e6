"""PyTorch's CUDA caching allocator, as far as it decides what "allocated" means: rounding, splitting, best fit.

vLLM reports the weights as what torch has allocated, and torch counts whole blocks. A block handed out is larger than
the tensor where the rest of it is too small to split off, or where splitting is forbidden: 0.21+ loads models with
`max_split_size_mb:20`, so that every block above 20 MiB is used whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from legroom.memory.allocator.settings import SMALL_REQUEST, SMALL_SEGMENT, SMALLEST_BLOCK, UNSPLIT_SLACK, segment_bytes
from legroom.records import dataclass, field
from legroom.units import cdiv, round_up


class TensorBlock(NamedTuple):
    """A piece of a segment, handed out or free. A tuple, since a model has thousands of them."""

    size: int
    segment: int
    offset: int


@dataclass(slots=True)
class TorchAllocator:
    """The large pool of one device. `max_split_bytes` None: blocks of any size may be split."""

    max_split_bytes: int | None = None
    expandable: bool = False
    allocated_bytes: int = 0
    peak_bytes: int = 0
    """The most that was allocated at one time."""
    reserved_bytes: int = 0
    _free: list[TensorBlock] = field(default_factory=list)
    """Sorted by size, then by segment and offset: the best fit is the first that is large enough."""
    _free_pieces: dict[int, set[TensorBlock]] = field(default_factory=dict)
    """Those that are less than their segment, by segment: whatever is freed beside one is joined with it."""
    _lengths: list[int] = field(default_factory=list)
    """Of every segment of the large pool, in order."""
    _small_bytes: int = 0
    """Handed out of the small pool."""
    _sorted_sizes: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Of tensors that are kept together: the bytes of the small pool, and the sizes of the large one."""

    @property
    def segments(self) -> list[int]:
        """The bytes of every segment that still holds something, the small pool's last."""
        empty = {segment for size, segment, _ in self._free if size == self._lengths[segment - 1]}
        large = [length for number, length in enumerate(self._lengths, 1) if number not in empty]
        return large + [SMALL_SEGMENT] * cdiv(self._small_bytes, SMALL_SEGMENT)

    def allocate(self, tensor_bytes: int) -> TensorBlock:
        """Hand out a block for a tensor."""
        size = -(-tensor_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK or SMALLEST_BLOCK
        # A small tensor comes from 2 MiB segments that are split exactly, so only the rounding counts.
        if size <= SMALL_REQUEST or self.expandable:
            self._small_bytes += size
            block = TensorBlock(size, -1, 0)
        else:
            limit, free = self.max_split_bytes, self._free
            index = bisect_left(free, (size,))
            if index < len(free) and (limit is None or _may_serve(free[index][0], size, limit)):
                block = free.pop(index)
                if block[0] < self._lengths[block[1] - 1]:
                    self._free_pieces[block[1]].remove(block)
            else:
                block = self._new_segment(size)
            rest = block[0] - size
            if rest > SMALL_REQUEST and (limit is None or size < limit):
                self._set_free(TensorBlock(rest, block[1], block[2] + size))
                block = TensorBlock(size, block[1], block[2])
        self.allocated_bytes += block[0]
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def keep(self, tensors: tuple[int, ...]) -> None:
        """Hand out blocks that nobody gives back. Layers are alike, so most of it is asked for many times."""
        sizes = self._sorted_sizes.get(tensors)
        if sizes is None:
            rounded = [round_up(size, SMALLEST_BLOCK) or SMALLEST_BLOCK for size in tensors]
            small = [size for size in rounded if size <= SMALL_REQUEST or self.expandable]
            large = () if self.expandable else tuple(size for size in rounded if size > SMALL_REQUEST)
            sizes = self._sorted_sizes[tensors] = (sum(small), large)
        self._small_bytes += sizes[0]
        self.allocated_bytes += sizes[0]
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        for size in sizes[1]:
            self.allocate(size)

    def free(self, block: TensorBlock) -> None:
        """Take a block back, joined with the free blocks beside it."""
        size, segment, start = block
        self.allocated_bytes -= size
        if segment < 0:
            self._small_bytes -= size
            return
        pieces = self._free_pieces.get(segment)
        if pieces:
            end = start + size
            beside = [piece for piece in pieces if piece.offset == end or piece.offset + piece.size == start]
            for piece in beside:
                pieces.remove(piece)
                del self._free[bisect_left(self._free, piece)]
                size, start = size + piece.size, min(start, piece.offset)
            block = TensorBlock(size, segment, start) if beside else block
        self._set_free(block)

    def _set_free(self, block: TensorBlock) -> None:
        insort(self._free, block)
        if block.size < self._lengths[block.segment - 1]:
            self._free_pieces.setdefault(block.segment, set()).add(block)

    def _new_segment(self, size: int) -> TensorBlock:
        length = segment_bytes(size)
        self._lengths.append(length)
        self.reserved_bytes += length
        return TensorBlock(length, len(self._lengths), 0)


def _may_serve(block_bytes: int, size: int, limit: int) -> bool:
    """Whether a free block that is large enough is handed out where blocks above `limit` must not be split."""
    return block_bytes < (limit if size < limit else size + UNSPLIT_SLACK)
