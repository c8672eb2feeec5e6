"""The block pool over columns: the same verbs as `blocks.py` and `kvcache.py`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from legroom.simulation.fast.columns import (
    ALL_BLOCKS, BLANK, CACHED, FAILED, FREE_IDS, FREE_RUNS, FREE_SLOTS, KEY_SPAN, NONE,
)  # fmt: skip
from legroom.simulation.fast.jit import compilable


@compilable
def place_of(pool, key):
    """Where the hash table holds `key`, or the empty place where it would."""
    mask = len(pool.hash_keys) - 1
    place = ((key ^ (key >> 20)) * 40503 >> 4) & mask
    while pool.hash_keys[place] != NONE and pool.hash_keys[place] != key:
        place = (place + 1) & mask
    return place


@compilable
def drop_place(pool, hole):
    """Empty a place of the hash table and close the gap."""
    mask = len(pool.hash_keys) - 1
    pool.hash_keys[hole] = NONE
    place = (hole + 1) & mask
    while pool.hash_keys[place] != NONE:
        key = pool.hash_keys[place]
        home = ((key ^ (key >> 20)) * 40503 >> 4) & mask
        if ((place - home) & mask) >= ((place - hole) & mask):
            pool.hash_keys[hole] = key
            pool.hash_blocks[hole] = pool.hash_blocks[place]
            pool.hash_keys[place] = NONE
            hole = place
        place = (place + 1) & mask


@compilable
def unlink(pool, node):
    """Take a node out of the free queue."""
    before, after = pool.before[node], pool.after[node]
    pool.after[before] = after
    pool.before[after] = before


@compilable
def link_last(pool, node):
    """Put a node at the back of the free queue."""
    end = len(pool.after) - 1
    last = pool.before[end]
    pool.after[last] = node
    pool.before[node] = last
    pool.after[node] = end
    pool.before[end] = node


@compilable
def make_findable(pool, block, key):
    """Cache the content of a full block. Of equal contents the one cached first is found first."""
    pool.keys[block] = key
    pool.copy_next[block] = NONE
    place = place_of(pool, key)
    if pool.hash_keys[place] == NONE:
        pool.hash_keys[place] = key
        pool.hash_blocks[place] = block
        pool.copy_prev[block] = NONE
        pool.copy_last[block] = block
        return
    first = pool.hash_blocks[place]
    last = pool.copy_last[first]
    pool.copy_next[last] = block
    pool.copy_prev[block] = last
    pool.copy_last[first] = block


@compilable
def forget(pool, block):
    """The content of a block is gone."""
    place = place_of(pool, pool.keys[block])
    following, preceding = pool.copy_next[block], pool.copy_prev[block]
    if preceding != NONE:
        pool.copy_next[preceding] = following
        if following != NONE:
            pool.copy_prev[following] = preceding
        else:
            pool.copy_last[pool.hash_blocks[place]] = preceding
    elif following != NONE:
        pool.hash_blocks[place] = following
        pool.copy_prev[following] = NONE
        pool.copy_last[following] = pool.copy_last[block]
    else:
        drop_place(pool, place)
    pool.keys[block] = NONE


@compilable
def take(pool, requests, count):
    """Take blocks from the front of the free queue: blank ones first, then the least recently used content."""
    counts = pool.counts
    blank = min(count, counts[BLANK])
    counts[BLANK] -= blank
    count -= blank
    end = len(pool.after) - 1
    num_ids = len(pool.refs)
    while count > 0:
        node = pool.after[end]
        if node >= num_ids:
            run = node - num_ids
            taken = min(count, pool.run_count[run])
            pool.run_count[run] -= taken
            if pool.run_count[run] == 0:
                if pool.run_owner[run] != NONE:
                    requests.run[pool.run_owner[run]] = NONE
                unlink(pool, node)
                pool.free_runs[counts[FREE_RUNS]] = run
                counts[FREE_RUNS] += 1
        else:
            taken = 1
            forget(pool, node)
            unlink(pool, node)
            pool.free_ids[counts[FREE_IDS]] = node
            counts[FREE_IDS] += 1
        counts[CACHED] -= taken
        count -= taken


@compilable
def told_apart(pool):
    """An identity for a block that was just taken."""
    pool.counts[FREE_IDS] -= 1
    block = pool.free_ids[pool.counts[FREE_IDS]]
    pool.refs[block] = 1
    pool.keys[block] = NONE
    return block


@compilable
def key_of(requests, streams, r, k):
    """The name of the content of block `k`: the stream it belongs to, and its place."""
    if k < requests.prefix_blocks[r]:
        stream = requests.prefix[r]
        # A prefix may itself begin with another one.
        while k < streams[2 * stream + 1]:
            stream = streams[2 * stream]
        return stream * KEY_SPAN + k
    if requests.straddle[r] != NONE and k == requests.prefix_blocks[r]:
        return requests.straddle[r] * KEY_SPAN + k
    return requests.tail[r] * KEY_SPAN + k


@compilable
def find_hit(pool, requests, streams, block_size, r):
    """Cached blocks from the start, and how many of them somebody is using."""
    most = (requests.tokens[r] - 1) // block_size
    shared = min(most, requests.shared_blocks[r])
    hit = used = 0
    while hit < shared:
        place = place_of(pool, key_of(requests, streams, r, hit))
        if pool.hash_keys[place] == NONE:
            return hit, used
        block = pool.hash_blocks[place]
        pool.found[hit] = block
        if pool.refs[block] > 0:
            used += 1
        hit += 1
    if hit == requests.shared_blocks[r] and requests.run[r] != NONE:
        hit += min(pool.run_count[requests.run[r]], most - hit)
    return hit, used


@compilable
def adopt(pool, requests, width, r, hit):
    """Hold the blocks that `find_hit` found."""
    counts = pool.counts
    counts[FREE_SLOTS] -= 1
    slot = pool.free_slots[counts[FREE_SLOTS]]
    requests.slot[r] = slot
    for k in range(min(hit, requests.shared_blocks[r])):
        block = pool.found[k]
        if pool.refs[block] == 0:
            unlink(pool, block)
            counts[CACHED] -= 1
        pool.refs[block] += 1
        pool.table[slot * width + k] = block
    run = requests.run[r]
    if hit > requests.shared_blocks[r]:
        if pool.run_count[run] != hit - requests.shared_blocks[r]:
            counts[FAILED] = 1
        unlink(pool, run + len(pool.refs))
        counts[CACHED] -= pool.run_count[run]
        pool.free_runs[counts[FREE_RUNS]] = run
        counts[FREE_RUNS] += 1
        requests.run[r] = NONE
    elif run != NONE:
        counts[FAILED] = 1
    requests.held[r] = hit
    requests.cached[r] = hit


@compilable
def grow(pool, requests, width, r, blocks):
    """Hold `blocks` blocks in all."""
    take(pool, requests, blocks - requests.held[r])
    for k in range(requests.held[r], min(blocks, requests.shared_blocks[r])):
        pool.table[requests.slot[r] * width + k] = told_apart(pool)
    requests.held[r] = blocks


@compilable
def cache_up_to(pool, requests, streams, width, r, blocks):
    """Make the first `blocks` blocks findable; counted ones are implied."""
    for k in range(requests.cached[r], min(blocks, requests.shared_blocks[r])):
        make_findable(pool, pool.table[requests.slot[r] * width + k], key_of(requests, streams, r, k))
    requests.cached[r] = max(requests.cached[r], blocks)


@compilable
def tell_apart_all(pool, requests, streams, width, r, cached_blocks, own_stream):
    """From now on every block of this request is told apart.

    A request that is thrown out in the very step that filled its last block leaves a block that it cannot find again,
    because its last token must be computed anew: a second copy of that block will come to be.
    """
    first = min(requests.held[r], requests.shared_blocks[r])
    requests.tail[r] = own_stream
    requests.shared_blocks[r] = ALL_BLOCKS
    for k in range(first, requests.held[r]):
        block = told_apart(pool)
        pool.table[requests.slot[r] * width + k] = block
        if k < cached_blocks:
            make_findable(pool, block, key_of(requests, streams, r, k))


@compilable
def release(pool, requests, width, r, cached_blocks, owner):
    """Give back every block of a request, the tail first; `owner` may come back for the counted ones."""
    counts = pool.counts
    held = requests.held[r]
    shared = min(held, requests.shared_blocks[r])
    kept = max(0, min(held, cached_blocks) - shared)
    if kept > 0:
        counts[FREE_RUNS] -= 1
        run = pool.free_runs[counts[FREE_RUNS]]
        pool.run_count[run] = kept
        pool.run_owner[run] = owner
        link_last(pool, run + len(pool.refs))
        counts[CACHED] += kept
        if owner != NONE:
            requests.run[r] = run
    counts[BLANK] += held - shared - kept
    slot = requests.slot[r]
    for k in range(shared - 1, -1, -1):
        block = pool.table[slot * width + k]
        pool.refs[block] -= 1
        if pool.refs[block] == 0:
            if pool.keys[block] == NONE:
                pool.free_ids[counts[FREE_IDS]] = block
                counts[FREE_IDS] += 1
                counts[BLANK] += 1
            else:
                link_last(pool, block)
                counts[CACHED] += 1
    pool.free_slots[counts[FREE_SLOTS]] = slot
    counts[FREE_SLOTS] += 1
    requests.held[r] = 0
    requests.cached[r] = 0
