"""The block pool over rows: the same verbs as `blocks.py` and `kvcache.py`.

The free queue is `state.blank` blocks without content, then a list of cached ones. A node of the list is a block that
is told apart, or a run: so many counted blocks of one request, the last of them first. Whose content nobody else can
have need not be told apart, so that most requests cost a handful of operations, not one a block.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import ALL_BLOCKS, KEY_SPAN, NONE


@compilable
def place_of(places, mask, key):
    """Where the hash table holds `key`, or the empty place where it would."""
    place = ((key ^ (key >> 20)) * 40503 >> 4) & mask
    while places[place].key != NONE and places[place].key != key:
        place = (place + 1) & mask
    return place


@compilable
def drop_place(places, mask, hole):
    """Empty a place of the hash table and close the gap."""
    places[hole].key = NONE
    place = (hole + 1) & mask
    while places[place].key != NONE:
        key = places[place].key
        home = ((key ^ (key >> 20)) * 40503 >> 4) & mask
        if ((place - home) & mask) >= ((place - hole) & mask):
            places[hole].key = key
            places[hole].block = places[place].block
            places[place].key = NONE
            hole = place
        place = (place + 1) & mask


@compilable
def unlink(blocks, node):
    """Take a node out of the free queue."""
    before, after = blocks[node].before, blocks[node].after
    blocks[before].after = after
    blocks[after].before = before


@compilable
def link_last(blocks, end, node):
    """Put a node at the back of the free queue."""
    last = blocks[end].before
    blocks[last].after = node
    blocks[node].before = last
    blocks[node].after = end
    blocks[end].before = node


@compilable
def make_findable(blocks, places, mask, block, key):
    """Cache the content of a full block. Of equal contents the one cached first is found first."""
    blocks[block].key = key
    blocks[block].copy_next = NONE
    place = place_of(places, mask, key)
    if places[place].key == NONE:
        places[place].key = key
        places[place].block = block
        blocks[block].copy_prev = NONE
        blocks[block].copy_last = block
        return
    first = places[place].block
    last = blocks[first].copy_last
    blocks[last].copy_next = block
    blocks[block].copy_prev = last
    blocks[first].copy_last = block


@compilable
def forget(blocks, places, mask, block):
    """The content of a block is gone."""
    place = place_of(places, mask, blocks[block].key)
    following, preceding = blocks[block].copy_next, blocks[block].copy_prev
    if preceding != NONE:
        blocks[preceding].copy_next = following
        if following != NONE:
            blocks[following].copy_prev = preceding
        else:
            blocks[places[place].block].copy_last = preceding
    elif following != NONE:
        places[place].block = following
        blocks[following].copy_prev = NONE
        blocks[following].copy_last = blocks[block].copy_last
    else:
        drop_place(places, mask, place)
    blocks[block].key = NONE


@compilable
def spare_run(sim, rules, run):
    """A run is used up."""
    state, blocks = sim.state[0], sim.blocks
    unlink(blocks, run)
    blocks[state.spare_runs].spare_run = run
    state.spare_runs += 1


@compilable
def take(sim, rules, count):
    """Take blocks from the front of the free queue: blank ones first, then the least recently used content."""
    state = sim.state[0]
    blank = min(count, state.blank)
    state.blank -= blank
    if count > blank:
        take_cached(sim, rules, count - blank)


@compilable
def take_cached(sim, rules, count):
    """Take `count` blocks whose content is lost by that."""
    state, blocks, requests = sim.state[0], sim.blocks, sim.requests
    state.cached -= count
    while count > 0:
        node = blocks[2 * rules.num_ids].after
        if node < rules.num_ids:
            forget(blocks, sim.places, rules.hash_mask, node)
            unlink(blocks, node)
            blocks[state.spare_ids].spare_id = node
            state.spare_ids += 1
            count -= 1
            continue
        taken = min(count, blocks[node].run_count)
        blocks[node].run_count -= taken
        count -= taken
        if blocks[node].run_count == 0:
            if blocks[node].run_owner != NONE:
                requests[blocks[node].run_owner].run = NONE
            spare_run(sim, rules, node)


@compilable
def told_apart(sim):
    """An identity for a block that was just taken."""
    state, blocks = sim.state[0], sim.blocks
    state.spare_ids -= 1
    block = blocks[state.spare_ids].spare_id
    blocks[block].refs = 1
    blocks[block].key = NONE
    return block


@compilable
def key_of(sim, r, k):
    """The name of the content of block `k`: the stream it belongs to, and its place."""
    request = sim.requests[r]
    stream = request.tail
    if k < request.prefix_blocks:
        stream = request.prefix
        # A prefix may itself begin with another one.
        streams = sim.streams
        while k < streams[2 * stream + 1]:
            stream = streams[2 * stream]
    elif k == request.prefix_blocks and request.straddle != NONE:
        stream = request.straddle
    return stream * KEY_SPAN + k


@compilable
def find_hit(sim, rules, r):
    """Cached blocks from the start, and how many of them somebody is using."""
    request, blocks, places, table = sim.requests[r], sim.blocks, sim.places, sim.table
    most = (request.tokens - 1) // rules.block_size
    shared = min(most, request.shared_blocks)
    last_row = rules.max_num_seqs * rules.row_width
    hit = used = 0
    while hit < shared:
        place = place_of(places, rules.hash_mask, key_of(sim, r, hit))
        if places[place].key == NONE:
            return hit, used
        block = places[place].block
        table[last_row + hit] = block
        if blocks[block].refs > 0:
            used += 1
        hit += 1
    if hit == request.shared_blocks and request.run != NONE:
        hit += min(blocks[request.run].run_count, most - hit)
    return hit, used


@compilable
def adopt(sim, rules, r, hit):
    """Take a seat and hold the blocks that `find_hit` found."""
    state, request, blocks, table = sim.state[0], sim.requests[r], sim.blocks, sim.table
    state.spare_slots -= 1
    request.slot = sim.seats[state.spare_slots].spare_slot
    row, last_row = request.slot * rules.row_width, rules.max_num_seqs * rules.row_width
    for k in range(min(hit, request.shared_blocks)):
        block = table[last_row + k]
        if blocks[block].refs == 0:
            unlink(blocks, block)
            state.cached -= 1
        blocks[block].refs += 1
        table[row + k] = block
    if hit > request.shared_blocks:
        if blocks[request.run].run_count != hit - request.shared_blocks:
            state.failed = 1
        state.cached -= blocks[request.run].run_count
        spare_run(sim, rules, request.run)
        request.run = NONE
    elif request.run != NONE:
        state.failed = 1
    request.held_blocks = hit
    request.cached = hit


@compilable
def grow(sim, rules, r, blocks):
    request, table = sim.requests[r], sim.table
    take(sim, rules, blocks - request.held_blocks)
    row = request.slot * rules.row_width
    for k in range(request.held_blocks, min(blocks, request.shared_blocks)):
        table[row + k] = told_apart(sim)
    request.held_blocks = blocks


@compilable
def cache_up_to(sim, rules, r, blocks):
    """Make the first `blocks` blocks findable; counted ones are implied."""
    request, table = sim.requests[r], sim.table
    row = request.slot * rules.row_width
    for k in range(request.cached, min(blocks, request.shared_blocks)):
        make_findable(sim.blocks, sim.places, rules.hash_mask, table[row + k], key_of(sim, r, k))
    request.cached = max(request.cached, blocks)


@compilable
def tell_apart_all(sim, rules, r, cached_blocks):
    """From now on every block of this request is told apart.

    A request that is thrown out in the very step that filled its last block leaves a block that it cannot find again,
    because its last token must be computed anew: a second copy of that block will come to be.
    """
    request, table = sim.requests[r], sim.table
    first = min(request.held_blocks, request.shared_blocks)
    request.tail = rules.own_streams + r
    request.shared_blocks = ALL_BLOCKS
    for k in range(first, request.held_blocks):
        block = told_apart(sim)
        table[request.slot * rules.row_width + k] = block
        if k < cached_blocks:
            make_findable(sim.blocks, sim.places, rules.hash_mask, block, key_of(sim, r, k))


@compilable
def release(sim, rules, r, cached_blocks, owner):
    """Give back every block of a request, the tail first; `owner` may come back for the counted ones."""
    state, request, blocks, table = sim.state[0], sim.requests[r], sim.blocks, sim.table
    held_blocks = request.held_blocks
    shared = min(held_blocks, request.shared_blocks)
    kept = max(0, min(held_blocks, cached_blocks) - shared)
    end = 2 * rules.num_ids
    if kept > 0:
        state.spare_runs -= 1
        run = blocks[state.spare_runs].spare_run
        blocks[run].run_count = kept
        blocks[run].run_owner = owner
        link_last(blocks, end, run)
        if owner != NONE:
            request.run = run
    state.cached += kept
    state.blank += held_blocks - shared - kept
    for place in range(request.slot * rules.row_width + shared - 1, request.slot * rules.row_width - 1, -1):
        block = table[place]
        blocks[block].refs -= 1
        if blocks[block].refs == 0:
            if blocks[block].key == NONE:
                blocks[state.spare_ids].spare_id = block
                state.spare_ids += 1
                state.blank += 1
            else:
                link_last(blocks, end, block)
                state.cached += 1
    sim.seats[state.spare_slots].spare_slot = request.slot
    state.spare_slots += 1
    request.held_blocks = 0
    request.cached = 0
