"""The block pool over rows, as in `block_pool.py` and `kv_cache_manager.py`.

The free queue is `state.free_uncached` blocks without content, then a linked list of cached ones. A node of the list is
a block with an id, or a run: a number of blocks of one request, its last block first. Blocks whose content no other
request can have need no id, so most requests cost a few operations instead of one per block.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import ALL_BLOCKS, KEY_SPAN, NONE


@compilable
def hash_slot(slots, mask, key):
    """The slot of the hash table that holds `key`, or the empty slot where it belongs."""
    slot = ((key ^ (key >> 20)) * 40503 >> 4) & mask
    while slots[slot].key != NONE and slots[slot].key != key:
        slot = (slot + 1) & mask
    return slot


@compilable
def drop_hash_slot(slots, mask, hole):
    """Empty a slot of the hash table and close the gap."""
    slots[hole].key = NONE
    slot = (hole + 1) & mask
    while slots[slot].key != NONE:
        key = slots[slot].key
        home = ((key ^ (key >> 20)) * 40503 >> 4) & mask
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            slots[hole].key = key
            slots[hole].block = slots[slot].block
            slots[slot].key = NONE
            hole = slot
        slot = (slot + 1) & mask


@compilable
def unlink(blocks, node):
    """Remove a node from the free queue."""
    before, after = blocks[node].before, blocks[node].after
    blocks[before].after = after
    blocks[after].before = before


@compilable
def link_last(blocks, end, node):
    """Append a node to the free queue."""
    last = blocks[end].before
    blocks[last].after = node
    blocks[node].before = last
    blocks[node].after = end
    blocks[end].before = node


@compilable
def cache_block(blocks, slots, mask, block, key):
    """Add a full block to the prefix cache. Of equal contents the one cached first is found first."""
    blocks[block].key = key
    blocks[block].copy_next = NONE
    slot = hash_slot(slots, mask, key)
    if slots[slot].key == NONE:
        slots[slot].key = key
        slots[slot].block = block
        blocks[block].copy_prev = NONE
        blocks[block].copy_last = block
        return
    first = slots[slot].block
    last = blocks[first].copy_last
    blocks[last].copy_next = block
    blocks[block].copy_prev = last
    blocks[first].copy_last = block


@compilable
def evict_block(blocks, slots, mask, block):
    """Remove a block from the prefix cache."""
    slot = hash_slot(slots, mask, blocks[block].key)
    following, preceding = blocks[block].copy_next, blocks[block].copy_prev
    if preceding != NONE:
        blocks[preceding].copy_next = following
        if following != NONE:
            blocks[following].copy_prev = preceding
        else:
            blocks[slots[slot].block].copy_last = preceding
    elif following != NONE:
        slots[slot].block = following
        blocks[following].copy_prev = NONE
        blocks[following].copy_last = blocks[block].copy_last
    else:
        drop_hash_slot(slots, mask, slot)
    blocks[block].key = NONE


@compilable
def retire_run(sim, rules, run):
    """Remove an empty run from the free queue."""
    state, blocks = sim.state[0], sim.blocks
    unlink(blocks, run)
    blocks[state.num_spare_runs].spare_run = run
    state.num_spare_runs += 1


@compilable
def take_free_blocks(sim, rules, count):
    """Take blocks from the front of the free queue: uncached ones first, then the least recently used."""
    state = sim.state[0]
    blank = min(count, state.free_uncached)
    state.free_uncached -= blank
    if count > blank:
        evict_free_blocks(sim, rules, count - blank)


@compilable
def evict_free_blocks(sim, rules, count):
    """Take `count` cached blocks from the free queue and evict their content."""
    state, blocks, requests = sim.state[0], sim.blocks, sim.requests
    state.free_cached -= count
    while count > 0:
        node = blocks[2 * rules.num_ids].after
        if node < rules.num_ids:
            evict_block(blocks, sim.hash_slots, rules.hash_mask, node)
            unlink(blocks, node)
            blocks[state.num_spare_ids].spare_id = node
            state.num_spare_ids += 1
            count -= 1
            continue
        taken = min(count, blocks[node].run_count)
        blocks[node].run_count -= taken
        count -= taken
        if blocks[node].run_count == 0:
            if blocks[node].run_owner != NONE:
                requests[blocks[node].run_owner].run = NONE
            retire_run(sim, rules, node)


@compilable
def assign_block_id(sim):
    """A block id for a block that was just taken."""
    state, blocks = sim.state[0], sim.blocks
    state.num_spare_ids -= 1
    block = blocks[state.num_spare_ids].spare_id
    blocks[block].refs = 1
    blocks[block].key = NONE
    return block


@compilable
def block_key(sim, r, k):
    """The cache key of block `k`: the stream of content it belongs to, and its index."""
    request = sim.requests[r]
    stream = request.suffix
    if k < request.prefix_blocks:
        stream = request.prefix
        # A prefix may begin with another prefix.
        streams = sim.streams
        while k < streams[2 * stream + 1]:
            stream = streams[2 * stream]
    elif k == request.prefix_blocks and request.boundary != NONE:
        stream = request.boundary
    return stream * KEY_SPAN + k


@compilable
def find_cache_hit(sim, rules, r):
    """Cached blocks from the start of the request, and how many of them a running request holds."""
    request, blocks, slots, table = sim.requests[r], sim.blocks, sim.hash_slots, sim.table
    most = (request.tokens - 1) // rules.block_size
    shared = min(most, request.shared_blocks)
    last_row = rules.max_num_seqs * rules.row_width
    hit = used = 0
    while hit < shared:
        slot = hash_slot(slots, rules.hash_mask, block_key(sim, r, hit))
        if slots[slot].key == NONE:
            return hit, used
        block = slots[slot].block
        table[last_row + hit] = block
        if blocks[block].refs > 0:
            used += 1
        hit += 1
    if hit == request.shared_blocks and request.run != NONE:
        hit += min(blocks[request.run].run_count, most - hit)
    return hit, used


@compilable
def hold_cached_blocks(sim, rules, r, hit):
    """Take a row of the block table and hold the blocks that `find_cache_hit` found."""
    state, request, blocks, table = sim.state[0], sim.requests[r], sim.blocks, sim.table
    state.num_spare_slots -= 1
    request.slot = sim.spare_slots[state.num_spare_slots]
    row, last_row = request.slot * rules.row_width, rules.max_num_seqs * rules.row_width
    for k in range(min(hit, request.shared_blocks)):
        block = table[last_row + k]
        if blocks[block].refs == 0:
            unlink(blocks, block)
            state.free_cached -= 1
        blocks[block].refs += 1
        table[row + k] = block
    if hit > request.shared_blocks:
        if blocks[request.run].run_count != hit - request.shared_blocks:
            state.failed = 1
        state.free_cached -= blocks[request.run].run_count
        retire_run(sim, rules, request.run)
        request.run = NONE
    elif request.run != NONE:
        state.failed = 1
    request.held_blocks = hit
    request.cached = hit


@compilable
def allocate_blocks(sim, rules, r, blocks):
    """Hold `blocks` blocks in all."""
    request, table = sim.requests[r], sim.table
    take_free_blocks(sim, rules, blocks - request.held_blocks)
    row = request.slot * rules.row_width
    for k in range(request.held_blocks, min(blocks, request.shared_blocks)):
        table[row + k] = assign_block_id(sim)
    request.held_blocks = blocks


@compilable
def cache_blocks(sim, rules, r, blocks):
    """Add the first `blocks` blocks to the prefix cache; those without an id are implied."""
    request, table = sim.requests[r], sim.table
    row = request.slot * rules.row_width
    for k in range(request.cached, min(blocks, request.shared_blocks)):
        cache_block(sim.blocks, sim.hash_slots, rules.hash_mask, table[row + k], block_key(sim, r, k))
    request.cached = max(request.cached, blocks)


@compilable
def assign_block_ids(sim, rules, r, cached_blocks):
    """Give every block of this request an id.

    A request that is preempted in the step that filled its last block leaves a block that it cannot find again, because
    its last token must be computed anew: a second copy of that block will exist.
    """
    request, table = sim.requests[r], sim.table
    first = min(request.held_blocks, request.shared_blocks)
    request.suffix = rules.first_own_stream + r
    request.shared_blocks = ALL_BLOCKS
    for k in range(first, request.held_blocks):
        block = assign_block_id(sim)
        table[request.slot * rules.row_width + k] = block
        if k < cached_blocks:
            cache_block(sim.blocks, sim.hash_slots, rules.hash_mask, block, block_key(sim, r, k))


@compilable
def free_blocks(sim, rules, r, cached_blocks, owner):
    """Free every block of a request, the last one first; `owner` may reuse those without an id."""
    state, request, blocks, table = sim.state[0], sim.requests[r], sim.blocks, sim.table
    held_blocks = request.held_blocks
    shared = min(held_blocks, request.shared_blocks)
    kept = max(0, min(held_blocks, cached_blocks) - shared)
    end = 2 * rules.num_ids
    if kept > 0:
        state.num_spare_runs -= 1
        run = blocks[state.num_spare_runs].spare_run
        blocks[run].run_count = kept
        blocks[run].run_owner = owner
        link_last(blocks, end, run)
        if owner != NONE:
            request.run = run
    state.free_cached += kept
    state.free_uncached += held_blocks - shared - kept
    for entry in range(request.slot * rules.row_width + shared - 1, request.slot * rules.row_width - 1, -1):
        block = table[entry]
        blocks[block].refs -= 1
        if blocks[block].refs == 0:
            if blocks[block].key == NONE:
                blocks[state.num_spare_ids].spare_id = block
                state.num_spare_ids += 1
                state.free_uncached += 1
            else:
                link_last(blocks, end, block)
                state.free_cached += 1
    sim.spare_slots[state.num_spare_slots] = request.slot
    state.num_spare_slots += 1
    request.held_blocks = 0
    request.cached = 0
