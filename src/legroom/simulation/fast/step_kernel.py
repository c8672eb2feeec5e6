"""The scheduler over rows: the same decisions as `scheduler.py`, many steps at a time."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from legroom.simulation.fast.accounting import (
    close_quiet_steps,
    close_step,
    span_seconds,
    step_seconds,
    steps_until_arrival,
    steps_until_dry,
)
from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.pool_kernel import (
    adopt,
    cache_up_to,
    find_hit,
    grow,
    release,
    take,
    tell_apart_all,
    told_apart,
)
from legroom.simulation.fast.queue_kernel import (
    arrive,
    drop_prefill,
    due_step,
    first_waiting,
    leave_queue,
    leave_running,
    skip_idle,
    sort_finishing,
    start_decoding,
    stop_decoding,
    wait,
)
from legroom.simulation.fast.rows import ALL_BLOCKS, DECODING, DONE, NONE, PREEMPTED, PREFILLING

_TOO_TIGHT, _PREEMPTED_SOME = -2, -1


@compilable
def preempt(sim, rules, r):
    """Throw a running request out: its blocks go back, its tokens will be computed again."""
    state, request = sim.state[0], sim.requests[r]
    if request.state == DECODING:
        computed = request.base + state.step
        request.tokens = computed + 1
        # Counted blocks are not booked one by one.
        request.held_blocks = -(-(computed + (1 if request.stamp == state.step else 0)) // rules.block_size)
        stop_decoding(sim, rules, r, state.num_running - state.num_prefills)
    else:
        computed = request.computed
        drop_prefill(sim, r)
    request.peak = max(request.peak, computed)
    cacheable = computed
    if request.stamp == state.step:
        # It had already got its tokens in this very step.
        cacheable += request.chunk
        state.stored -= request.chunk
        state.scheduled_tokens -= request.chunk
        request.stamp = NONE
    leave_running(sim, r)
    state.held_blocks -= request.held_blocks
    state.stored -= computed
    cached_blocks = cacheable // rules.block_size if rules.caching else 0
    if cached_blocks > (request.tokens - 1) // rules.block_size and request.shared_blocks != ALL_BLOCKS:
        tell_apart_all(sim, rules, r, cached_blocks)
    release(sim, rules, r, cached_blocks, r)
    request.computed = 0
    request.state = PREEMPTED
    request.preemptions += 1
    state.preemptions += 1
    wait(sim, rules, r, True)


@compilable
def victim(sim, rules):
    """The last in line, or the least urgent."""
    requests, running, size = sim.requests, sim.running, sim.state[0].num_running
    chosen = running[size - 1]
    if rules.by_priority:
        for i in range(size):
            if requests[running[i]].urgency > requests[chosen].urgency:
                chosen = running[i]
    return chosen


@compilable
def chunk_of(sim, r, threshold, budget):
    """Tokens that a prefilling request gets."""
    wanted = sim.requests[r].tokens - sim.requests[r].computed
    if 0 < threshold < wanted:
        wanted = threshold
    return min(wanted, budget)


@compilable
def hold_chunk(sim, rules, r, computed, chunk):
    """Book `chunk` more tokens of a request that has `computed` so far."""
    state, request = sim.state[0], sim.requests[r]
    blocks = -(-(computed + chunk) // rules.block_size)
    if blocks > request.held_blocks:
        state.held_blocks += blocks - request.held_blocks
        grow(sim, rules, r, blocks)
    if rules.caching:
        cache_up_to(sim, rules, r, (computed + chunk) // rules.block_size)
    request.chunk = chunk
    request.stamp = state.step
    state.stored += chunk
    state.scheduled_tokens += chunk


@compilable
def run_slowly(sim, rules, threshold):
    """The running requests one by one, with preemption where the pool runs dry: the budget left, if nobody was."""
    state, requests, running, bs = sim.state[0], sim.requests, sim.running, rules.block_size
    budget = rules.max_num_batched_tokens
    before = state.preemptions
    index = 0
    while index < state.num_running and budget > 0:
        r = running[index]
        if requests[r].state == DECODING:
            computed, chunk = requests[r].base + state.step, 1
            if computed % bs and (requests[r].shared_blocks != ALL_BLOCKS or (computed + 1) % bs):
                # The token goes into a block that it holds.
                requests[r].chunk = 1
                requests[r].stamp = state.step
                state.stored += 1
                state.scheduled_tokens += 1
                budget -= 1
                index += 1
                continue
            requests[r].held_blocks = -(-computed // bs)
        else:
            computed, chunk = requests[r].computed, chunk_of(sim, r, threshold, budget)
        need = -(-(computed + chunk) // bs) - requests[r].held_blocks
        while need > state.blank + state.cached:
            thrown = victim(sim, rules)
            if requests[thrown].rank < requests[r].rank:
                index -= 1
            if requests[thrown].stamp == state.step:
                budget += requests[thrown].chunk
            preempt(sim, rules, thrown)
            if thrown == r:
                break
        if requests[r].state == PREEMPTED:
            break
        hold_chunk(sim, rules, r, computed, chunk)
        budget -= chunk
        index += 1
    for i in range(state.num_running):
        r = running[i]
        if requests[r].state == DECODING and requests[r].stamp != state.step:
            # It got nothing in this step: all its dates move by one.
            decodes = state.num_running - state.num_prefills
            stop_decoding(sim, rules, r, decodes)
            start_decoding(sim, rules, r, requests[r].base - 1, decodes - 1)
    return _PREEMPTED_SOME if state.preemptions > before else budget


@compilable
def run_at_once(sim, rules, threshold):
    """The running requests if nobody need be preempted and those that prefill come last: the budget left."""
    state, requests, seats, bs = sim.state[0], sim.requests, sim.seats, rules.block_size
    prefills = state.num_prefills
    decodes = state.num_running - prefills
    if prefills and sim.running[decodes] != seats[0].prefill:
        return _TOO_TIGHT
    free = state.blank + state.cached - seats[state.step % bs].decodes
    budget = rules.max_num_batched_tokens - decodes
    for i in range(prefills):
        r = seats[i].prefill
        chunk = chunk_of(sim, r, threshold, budget)
        seats[i].need = chunk
        budget -= chunk
        if chunk:
            free -= -(-(requests[r].computed + chunk) // bs) - requests[r].held_blocks
    if free < 0 or budget < 0:
        return _TOO_TIGHT
    if decodes:
        advance_decodes(sim, rules, 1)
    for i in range(prefills):
        r = seats[i].prefill
        if seats[i].need:
            hold_chunk(sim, rules, r, requests[r].computed, seats[i].need)
    return budget


@compilable
def advance_decodes(sim, rules, steps):
    """Every decoding request computes one token in each of `steps` steps; the pool is known to suffice."""
    state, seats, bs = sim.state[0], sim.seats, rules.block_size
    decodes = state.num_running - state.num_prefills
    blocks = steps // bs * decodes
    for offset in range(steps % bs):
        blocks += seats[(state.step + offset) % bs].decodes
    take(sim, rules, blocks)
    state.held_blocks += blocks
    state.stored += steps * decodes
    state.scheduled_tokens += steps * decodes
    if state.shared_decodes:
        advance_shared(sim, rules, steps)


@compilable
def advance_shared(sim, rules, steps):
    """Blocks that are told apart get their identity when taken, and can be found when full, in the order of time."""
    state, requests, seats, running, bs = sim.state[0], sim.requests, sim.seats, sim.running, rules.block_size
    table, width = sim.table, rules.row_width
    for step in range(state.step, state.step + steps):
        if not seats[step % bs].shared_decodes and not seats[(step + 1) % bs].shared_decodes:
            continue
        for i in range(state.num_running):
            r = running[i]
            if requests[r].state != DECODING or requests[r].shared_blocks != ALL_BLOCKS:
                continue
            computed = requests[r].base + step
            if computed % bs == 0:
                table[requests[r].slot * width + computed // bs] = told_apart(sim)
                requests[r].held_blocks = computed // bs + 1
            if (computed + 1) % bs == 0:
                cache_up_to(sim, rules, r, (computed + 1) // bs)


@compilable
def admit(sim, rules, budget, threshold):
    """Admit waiting requests while budget, seats and blocks last. True if the first one must wait for a change."""
    state, requests, bs = sim.state[0], sim.requests, rules.block_size
    while budget > 0 and state.num_waiting and state.num_running < rules.max_num_seqs:
        r = first_waiting(sim, rules)
        request = requests[r]
        hit, used = 0, 0
        if rules.caching:
            hit, used = find_hit(sim, rules, r)
        wanted = request.tokens - hit * bs
        if 0 < threshold < wanted:
            wanted = threshold
        if wanted > budget and not rules.chunked:
            return True
        wanted = min(wanted, budget)
        free = state.blank + state.cached
        if state.num_running:
            free -= rules.watermark_blocks
        if rules.reserve_full and -(-request.tokens // bs) - used > free:
            # A twin that decodes may cache the very blocks that this one would find.
            return request.state != PREEMPTED or request.shared_blocks != ALL_BLOCKS
        if -(-(hit * bs + wanted) // bs) - used > free:
            # Losing some of the hit would make the first chunk end earlier, and fit.
            return hit == 0
        leave_queue(sim, rules)
        seat(sim, rules, r, hit)
        hold_chunk(sim, rules, r, hit * bs, wanted)
        budget -= wanted
    return False


@compilable
def seat(sim, rules, r, hit):
    """A waiting request starts to run, with `hit` blocks from the prefix cache."""
    state, request = sim.state[0], sim.requests[r]
    sim.running[state.num_running] = r
    sim.seats[state.num_prefills].prefill = r
    state.num_running += 1
    state.num_prefills += 1
    request.rank = state.next_rank
    state.next_rank += 1
    tokens = hit * rules.block_size
    if request.first_sched == NONE:
        request.first_sched = state.step
        request.sched_s = state.now
        state.prompt_tokens += request.prompt
        state.cached_tokens += tokens
    request.state = PREFILLING
    adopt(sim, rules, r, hit)
    request.computed = tokens
    state.held_blocks += hit
    state.stored += tokens


@compilable
def settle_prefills(sim, rules):
    """The step has run: prompts that are complete have sampled a token."""
    state, requests, seats = sim.state[0], sim.requests, sim.seats
    kept = 0
    decodes = state.num_running - state.num_prefills
    for i in range(state.num_prefills):
        r = seats[i].prefill
        request = requests[r]
        if request.stamp == state.step:
            state.recomputed_tokens += max(0, min(request.chunk, request.peak - request.computed))
            request.computed += request.chunk
            request.peak = max(request.peak, request.computed)
        complete = request.computed == request.tokens
        if complete:
            request.tokens += 1
            if request.first_token == NONE:
                request.first_token = state.step
                request.token_s = state.now
        if complete and request.tokens < request.total:
            start_decoding(sim, rules, r, request.computed - state.step - 1, decodes)
            decodes += 1
            continue
        if complete:
            seats[state.num_finishing].finishing = r
            state.num_finishing += 1
        seats[kept].prefill = r
        kept += 1
    state.num_prefills = kept


@compilable
def finish_due(sim, rules):
    """Free those that sampled their last token, in running order."""
    state, requests, seats, due = sim.state[0], sim.requests, sim.seats, sim.due
    after_prefill = state.num_finishing
    decodes = state.num_running - state.num_prefills
    while decodes and due_step(sim, due[decodes - 1]) == state.step:
        decodes -= 1
        seats[state.num_finishing].finishing = due[decodes]
        state.num_finishing += 1
    if after_prefill and state.num_finishing > 1:
        sort_finishing(sim)
    for i in range(state.num_finishing):
        r = seats[i].finishing
        computed = requests[r].total - 1
        if requests[r].state == DECODING:
            stop_decoding(sim, rules, r, state.num_running - state.num_prefills)
            # Counted blocks were not booked one by one.
            requests[r].held_blocks = -(-computed // rules.block_size)
        else:
            drop_prefill(sim, r)
        leave_running(sim, r)
        state.held_blocks -= requests[r].held_blocks
        state.stored -= computed
        release(sim, rules, r, computed // rules.block_size if rules.caching else 0, NONE)
        requests[r].state = DONE
        requests[r].finish = state.step
        requests[r].finish_s = state.now
    if state.num_finishing:
        state.blocked = 0
    state.finished += state.num_finishing
    state.num_finishing = 0


@compilable
def one_step(sim, rules, cost):
    """A step in which something may be decided."""
    state = sim.state[0]
    alone = state.num_running + state.num_waiting <= 1
    threshold = 0 if alone else rules.threshold
    was_steady = state.num_prefills == 0
    scheduled_before = state.scheduled_tokens
    budget = run_at_once(sim, rules, threshold)
    if budget == _TOO_TIGHT:
        budget = run_slowly(sim, rules, threshold)
    blocked = budget >= 0 and admit(sim, rules, budget, threshold)
    state.blocked = 1 if blocked and was_steady and state.num_prefills == 0 else 0
    if rules.in_seconds:
        tokens = state.scheduled_tokens - scheduled_before
        state.now += step_seconds(cost, tokens, state.stored, state.num_running)
    if state.num_prefills:
        settle_prefills(sim, rules)
    finish_due(sim, rules)
    close_step(sim, rules)
    state.step += 1


@compilable
def jump(sim, rules, cost, steps):
    """Take `steps` steps of pure decoding; requests may finish in the last of them."""
    state = sim.state[0]
    ends = state.now
    if rules.in_seconds:
        # Who comes during the last step is not seen in it: arrivals are taken as that step begins.
        ends += span_seconds(cost, state.num_running, state.stored + state.num_running, steps)
        state.now += span_seconds(cost, state.num_running, state.stored + state.num_running, steps - 1)
    if steps > 1:
        close_quiet_steps(sim, rules, steps - 1)
    advance_decodes(sim, rules, steps)
    state.step += steps - 1
    arrive(sim, rules)
    state.now = ends
    finish_due(sim, rules)
    close_step(sim, rules)
    state.step += 1


@compilable
def quiet_steps(sim, rules, cost):
    """How many steps from here on are pure decoding: 0 if something may be decided in the next one."""
    state = sim.state[0]
    if state.num_running == 0 or state.num_prefills:
        return 0
    has_seats = state.num_running < rules.max_num_seqs and state.num_running < rules.max_num_batched_tokens
    if has_seats and state.num_waiting and not state.blocked:
        return 0
    steps = due_step(sim, sim.due[state.num_running - 1]) - state.step + 1
    steps = steps_until_dry(sim, rules, steps)
    if has_seats and (rules.by_priority or not state.num_waiting):
        steps = steps_until_arrival(sim, rules, cost, steps)
    return steps


@compilable
def replay(sim, rules, cost, turns):
    """Go on for `turns` events. True while there is more to do."""
    state = sim.state[0]
    for _ in range(turns):
        if state.failed:
            return False
        if not state.num_running and not state.num_waiting and not skip_idle(sim, rules):
            return False
        arrive(sim, rules)
        steps = quiet_steps(sim, rules, cost)
        if steps > 0:
            jump(sim, rules, cost, steps)
        else:
            one_step(sim, rules, cost)
    return True
