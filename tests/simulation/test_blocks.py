from __future__ import annotations

from legroom.simulation.block_pool import BlockPool


def test_a_block_without_cached_content_is_reused_first() -> None:
    pool = BlockPool(4)
    first, second, third = pool.get_new_blocks(3)
    pool.cache_full_block(first, (0, 7))
    pool.free_blocks([first])
    pool.free_blocks([second])
    assert pool.get_new_blocks(1) == [second]
    assert pool.get_new_blocks(1) == [first]
    assert third.ref_count == 1


def test_cached_content_is_lost_when_its_block_is_reused() -> None:
    pool = BlockPool(2)
    [block] = pool.get_new_blocks(1)
    pool.cache_full_block(block, (0, 7))
    pool.free_blocks([block])
    assert pool.get_cached_block((0, 7)) is block
    pool.get_new_blocks(1)
    assert pool.get_cached_block((0, 7)) is None


def test_of_two_copies_the_one_cached_first_is_found() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_block(second, (0, 7))
    pool.cache_full_block(first, (0, 7))
    assert pool.get_cached_block((0, 7)) is second


def test_a_block_in_use_by_two_is_free_after_both_leave() -> None:
    pool = BlockPool(2)
    [block] = pool.get_new_blocks(1)
    pool.cache_full_block(block, (0, 7))
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.num_free_blocks == 0
    pool.free_blocks([block])
    assert pool.num_free_blocks == 1
