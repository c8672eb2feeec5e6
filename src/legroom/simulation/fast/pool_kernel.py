"""The block pool over rows, as in `block_pool.py` and `kv_cache_manager.py`, in spans of blocks instead of single ones.

A cell is a span of blocks of one stream of content, an extent one copy of a cell in the pool. Cells are split where
requests need a part of them. The free queue is `state.free_uncached` blocks without content, then a linked list of
extents that no running request holds, each with its last block first.
"""
# mypy: disable-error-code="no-any-return"

from typing import Any

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import ALL_BLOCKS, NONE, Rules, Sim


@compilable
def link_after(extents: Any, place: int, extent: int) -> None:
    """Inserts extent number `extent` (a run of free blocks) into the free queue after number `place`."""
    following = extents[place].after
    extents[place].after = extent
    extents[extent].before = place
    extents[extent].after = following
    extents[following].before = extent


@compilable
def unlink(extents: Any, extent: int) -> None:
    """Removes extent number `extent` (a run of free blocks) from the free queue."""
    before, after = extents[extent].before, extents[extent].after
    extents[before].after = after
    extents[after].before = before


@compilable
def stream_at(sim: Sim, rules: Rules, r: int, k: int) -> tuple[int, int]:
    """(the token stream that fills block `k` of request number `r`, the first block of `r` with another stream)."""
    request, streams = sim.requests[r], sim.streams
    if k >= request.prefix_blocks:
        if k == request.prefix_blocks and request.boundary != NONE:
            return request.boundary, k + 1
        return (request.suffix if request.suffix != NONE else rules.first_own_stream + r), ALL_BLOCKS
    stream, end = request.prefix, request.prefix_blocks
    # A prefix may begin with another prefix.
    while k < streams[2 * stream + 1]:
        end = streams[2 * stream + 1]
        stream = streams[2 * stream]
    return stream, end


@compilable
def add_cell(sim: Sim, stream: int, start: int, end: int, previous: int) -> int:
    """Adds a cell, cached blocks `start` to `end` (excluded) of a stream, after `previous` (0: first); its number."""
    state, cells = sim.state[0], sim.cells
    cell = state.spare_cell
    state.spare_cell = cells[cell].following
    cells[cell].stream, cells[cell].start, cells[cell].end = stream, start, end
    cells[cell].first_copy = cells[cell].last_copy = 0
    following = cells[previous].following if previous else sim.first_cells[stream]
    cells[cell].previous, cells[cell].following = previous, following
    cells[following].previous = cell
    if previous:
        cells[previous].following = cell
    else:
        sim.first_cells[stream] = cell
    return cell


@compilable
def add_copy(sim: Sim, cell: int, refs: int) -> int:
    """Adds an extent, one more copy in the pool of cell number `cell`'s blocks, with `refs` references; its number."""
    state, extents, last = sim.state[0], sim.extents, sim.cells[cell].last_copy
    extent = state.spare_extent
    state.spare_extent = extents[extent].after
    extents[extent].cell, extents[extent].refs = cell, refs
    extents[extent].previous_copy, extents[extent].next_copy = last, 0
    if last:
        extents[last].next_copy = extent
    else:
        sim.cells[cell].first_copy = extent
    sim.cells[cell].last_copy = extent
    return extent


@compilable
def drop_copy(sim: Sim, extent: int) -> None:
    """Takes extent number `extent`, a copy of a cell's blocks, off the free queue and out of the prefix cache."""
    state, extents, cells, cell = sim.state[0], sim.extents, sim.cells, sim.extents[extent].cell
    unlink(extents, extent)
    before, after = extents[extent].previous_copy, extents[extent].next_copy
    if before:
        extents[before].next_copy = after
    else:
        cells[cell].first_copy = after
    if after:
        extents[after].previous_copy = before
    else:
        cells[cell].last_copy = before
    extents[extent].after = state.spare_extent
    state.spare_extent = extent
    if cells[cell].first_copy == 0:
        previous, following = cells[cell].previous, cells[cell].following
        cells[following].previous = previous
        if previous:
            cells[previous].following = following
        else:
            sim.first_cells[cells[cell].stream] = following
        cells[cell].following = state.spare_cell
        state.spare_cell = cell


@compilable
def split_cell(sim: Sim, cell: int, at: int) -> None:
    """Splits cell number `cell` (cached blocks) and its extents (copies) at block `at`; later parts keep numbers."""
    cells, extents = sim.cells, sim.extents
    later = add_cell(sim, cells[cell].stream, at, cells[cell].end, cell)
    extent = cells[cell].first_copy
    cells[later].first_copy, cells[later].last_copy = extent, cells[cell].last_copy
    cells[cell].end = at
    cells[cell].first_copy = cells[cell].last_copy = 0
    while extent:
        earlier = add_copy(sim, cell, extents[extent].refs)
        extents[extent].cell = later
        extents[earlier].earlier_part = extents[extent].earlier_part
        extents[extent].earlier_part = earlier
        if extents[extent].refs == 0:
            link_after(extents, extent, earlier)
        extent = extents[extent].next_copy


@compilable
def push_hold(sim: Sim, r: int, extent: int, start: int) -> None:
    """Records that request number `r` holds extent number `extent` as its blocks from block `start` on."""
    state, request, holds = sim.state[0], sim.requests[r], sim.holds
    hold = state.spare_hold
    if hold == 0:
        state.failed = 1
        return
    state.spare_hold = holds[hold].below
    holds[hold].extent, holds[hold].start, holds[hold].below = extent, start, request.last_hold
    request.last_hold = hold


@compilable
def take_free_blocks(sim: Sim, count: int) -> None:
    """Takes `count` blocks off the free queue: uncached ones, then evicting the least recently used cached ones."""
    state, cells, extents = sim.state[0], sim.cells, sim.extents
    blank = min(count, state.free_uncached)
    state.free_uncached -= blank
    count -= blank
    state.free_cached -= count
    while count > 0:
        extent = extents[0].after
        cell = extents[extent].cell
        size = cells[cell].end - cells[cell].start
        if count < size:
            if cells[cell].first_copy == cells[cell].last_copy:
                cells[cell].end -= count
                return
            split_cell(sim, cell, cells[cell].end - count)
            size = count
        drop_copy(sim, extent)
        count -= size


@compilable
def find_cache_hit(sim: Sim, rules: Rules, r: int) -> tuple[int, int]:
    """(leading blocks of request number `r` that are cached, how many of these running requests hold). Their extents
    are left in `sim.hits`."""
    state, cells, extents = sim.state[0], sim.cells, sim.extents
    most = (sim.requests[r].tokens - 1) // rules.block_size
    hit = used = state.num_hits = 0
    end = 0
    while hit == end and hit < most:
        stream, end = stream_at(sim, rules, r, hit)
        end = min(end, most)
        cell = sim.first_cells[stream]
        while cell and hit < end and cells[cell].start == hit:
            if cells[cell].end > end:
                split_cell(sim, cell, end)
            sim.hits[state.num_hits] = cells[cell].first_copy
            state.num_hits += 1
            hit = cells[cell].end
            if extents[cells[cell].first_copy].refs > 0:
                used += hit - cells[cell].start
            cell = cells[cell].following
    return hit, used


@compilable
def hold_cached_blocks(sim: Sim, r: int, hit: int) -> None:
    """Makes request number `r` hold the `hit` cached blocks whose extents `find_cache_hit` left in `sim.hits`."""
    state, request, extents, cells = sim.state[0], sim.requests[r], sim.extents, sim.cells
    for i in range(state.num_hits):
        extent = sim.hits[i]
        cell = extents[extent].cell
        if extents[extent].refs == 0:
            unlink(extents, extent)
            state.free_cached -= cells[cell].end - cells[cell].start
        extents[extent].refs += 1
        push_hold(sim, r, extent, cells[cell].start)
    request.held_blocks = request.cached = hit
    state.num_hits = 0


@compilable
def cache_blocks(sim: Sim, rules: Rules, r: int, blocks: int) -> None:
    """Adds those of the first `blocks` blocks of request number `r` to the prefix cache that are not in it yet."""
    request, cells, extents = sim.requests[r], sim.cells, sim.extents
    k = request.cached
    while k < blocks:
        stream, end = stream_at(sim, rules, r, k)
        end = min(end, blocks)
        cell = 0
        if request.last_hold:
            extent = sim.holds[request.last_hold].extent
            cell = extents[extent].cell
            following = cells[cell].following
            if cells[cell].stream != stream:
                cell = 0
            elif (
                extents[extent].refs == 1
                and cells[cell].first_copy == cells[cell].last_copy
                and (following == 0 or cells[following].start >= end)
            ):
                cells[cell].end = k = end
        while k < end:
            following = cells[cell].following if cell else sim.first_cells[stream]
            if following == 0 or cells[following].start > k:
                stop = min(end, cells[following].start) if following else end
                following = add_cell(sim, stream, k, stop, cell)
            elif cells[following].end > end:
                split_cell(sim, following, end)
            cell = following
            push_hold(sim, r, add_copy(sim, cell, 1), k)
            k = cells[cell].end
    request.cached = max(request.cached, blocks)


@compilable
def free_blocks(sim: Sim, rules: Rules, r: int, cached_blocks: int) -> None:
    """Frees all blocks of request number `r`, the last first; its first `cached_blocks` stay in the prefix cache."""
    state, request, extents, cells = sim.state[0], sim.requests[r], sim.extents, sim.cells
    # Content that no other request has is added to the cache here: nobody could have found it before.
    cache_blocks(sim, rules, r, cached_blocks)
    state.free_uncached += request.held_blocks - request.cached
    while request.last_hold:
        hold = sim.holds[request.last_hold]
        extent = hold.extent
        while True:
            cell = extents[extent].cell
            extents[extent].refs -= 1
            if extents[extent].refs == 0:
                link_after(extents, extents[0].before, extent)
                state.free_cached += cells[cell].end - cells[cell].start
            if cells[cell].start <= hold.start:
                break
            extent = extents[extent].earlier_part
        below = hold.below
        hold.below = state.spare_hold
        state.spare_hold = request.last_hold
        request.last_hold = below
    request.held_blocks = 0
    request.cached = 0
