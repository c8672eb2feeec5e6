from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from legroom.memory.weights.torch_allocator import TorchAllocator

MIB = 2**20


def allocated(sizes: list[int], limit: int | None = None) -> int:
    allocator = TorchAllocator(limit)
    for size in sizes:
        allocator.allocate(size)
    return allocator.allocated_bytes


def test_small_tensors_are_rounded_to_512_bytes() -> None:
    assert allocated([4, 513, 512]) == 512 + 1024 + 512


def test_a_rest_of_up_to_a_mebibyte_is_not_split_off() -> None:
    assert allocated([259 * MIB]) == 260 * MIB
    assert allocated([24 * MIB + MIB // 2]) == 24 * MIB + MIB // 2


def test_under_a_split_limit_large_blocks_are_used_whole() -> None:
    assert allocated([24 * MIB + MIB // 2], 20 * MIB) == 26 * MIB


def test_a_freed_block_is_used_again_by_the_best_fit() -> None:
    allocator = TorchAllocator(20 * MIB)
    block = allocator.allocate(64 * MIB)
    allocator.free(block)
    allocator.allocate(48 * MIB)
    assert allocator.allocated_bytes == 64 * MIB


def test_under_a_split_limit_a_block_20_mib_too_large_stays_free() -> None:
    allocator = TorchAllocator(20 * MIB)
    allocator.free(allocator.allocate(70 * MIB))
    allocator.allocate(48 * MIB)
    assert allocator.allocated_bytes == 48 * MIB


def test_neighbours_are_joined_when_they_are_freed() -> None:
    allocator = TorchAllocator()
    first, second = allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(20 * MIB).segment == first.segment


@given(st.lists(st.integers(1, 400 * MIB), max_size=40), st.sampled_from([None, 20 * MIB]))
def test_what_is_freed_is_gone_and_nothing_is_handed_out_short(sizes: list[int], limit: int | None) -> None:
    allocator = TorchAllocator(limit)
    blocks = [allocator.allocate(size) for size in sizes]
    assert all(block.size >= size for block, size in zip(blocks, sizes, strict=True))
    assert allocator.allocated_bytes == sum(block.size for block in blocks)
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=30), st.data())
def test_blocks_never_overlap(sizes: list[int], data: st.DataObject) -> None:
    allocator = TorchAllocator()
    alive = []
    for size in sizes:
        if alive and data.draw(st.booleans()):
            allocator.free(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        alive.append(allocator.allocate(size))
    large = sorted((b.segment, b.offset, b.offset + b.size) for b in alive if b.segment >= 0)
    for before, after in pairwise(large):
        assert before[0] != after[0] or before[2] <= after[1]


@given(
    st.lists(st.lists(st.integers(1, 30 * MIB), min_size=1, max_size=4), max_size=12),
    st.sampled_from([(None, False), (20 * MIB, False), (None, True)]),
)
def test_tensors_that_are_kept_take_what_they_take_one_by_one(
    groups: list[list[int]], kind: tuple[int | None, bool]
) -> None:
    together, apart = TorchAllocator(*kind), TorchAllocator(*kind)
    for allocator in (together, apart):
        allocator.free(allocator.allocate(50 * MIB))
    for sizes in groups * 2:
        together.keep(tuple(sizes))
        for size in sizes:
            apart.allocate(size)
    assert (together.allocated_bytes, together.segments) == (apart.allocated_bytes, apart.segments)
    assert together.peak_bytes == apart.peak_bytes
