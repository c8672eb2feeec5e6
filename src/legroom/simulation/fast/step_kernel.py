"""The scheduler over rows: the same decisions as `scheduler.py`, many steps at a time; `r` is the row of a request."""
# mypy: disable-error-code="no-any-return"

from legroom.simulation.fast.accounting import (
    decode_steps_seconds,
    record_decode_steps,
    record_step,
    step_seconds,
    steps_until_arrival,
    steps_until_pool_full,
)
from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.pool_kernel import (
    cache_blocks,
    find_cache_hit,
    free_blocks,
    hold_cached_blocks,
    take_free_blocks,
)
from legroom.simulation.fast.queue_kernel import (
    ask_again,
    enqueue,
    enqueue_arrivals,
    last_step,
    peek_waiting,
    pop_waiting,
    remove_from,
    remove_running,
    skip_to_next_arrival,
    sort_finishing,
    start_decoding,
    stop_decoding,
)
from legroom.simulation.fast.rows import (
    ALL_BLOCKS,
    DECODING,
    DONE,
    FINISHING,
    NONE,
    PREEMPTED,
    PREFILLING,
    Rules,
    Sim,
    StepCost,
)

_TOO_TIGHT, _PREEMPTED = -2, -1


@compilable
def preempt(sim: Sim, rules: Rules, r: int) -> None:
    """Frees the blocks of running request number `r` and queues it again, unless a step in flight finishes it."""
    state, request = sim.state[0], sim.requests[r]
    was_scheduled = request.scheduled_step == state.step
    computed = request.computed
    if request.state == DECODING:
        computed = request.step_offset + state.step
        request.tokens = computed + 1
        # The count of blocks is not updated while decoding.
        request.held_blocks = -(-(computed + (1 if was_scheduled else 0)) // rules.block_size)
        stop_decoding(sim, rules, r)
    elif request.state == FINISHING:
        computed = request.total - 1
        remove_from(sim.finishing, state.num_finishing, r)
        state.num_finishing -= 1
        state.finished += 1
    else:
        remove_from(sim.prefills, state.num_prefills, r)
        state.num_prefills -= 1
    request.peak = max(request.peak, computed)
    cacheable = computed
    if rules.async_scheduling and request.state != PREFILLING:
        # The token that the step in flight samples is not known yet.
        cacheable = computed if request.skipped_step == state.step - 1 else max(request.computed, computed - 1)
    if was_scheduled:
        # Its tokens of this step were already scheduled.
        cacheable = max(request.computed, cacheable + request.chunk)
        state.stored -= request.chunk
        state.scheduled_tokens -= request.chunk
        request.scheduled_step = NONE
    remove_running(sim, r)
    state.held_blocks -= request.held_blocks
    state.stored -= computed
    free_blocks(sim, rules, r, cacheable // rules.block_size if rules.enable_prefix_caching else 0)
    request.computed = 0
    request.preemptions += 1
    state.preemptions += 1
    if request.state == FINISHING:
        request.state = DONE
        return
    request.state = PREEMPTED
    enqueue(sim, rules, r, True)


@compilable
def cache_shared_blocks(sim: Sim, rules: Rules, r: int, tokens: int) -> None:
    """Adds the full blocks of the first `tokens` of request number `r` to the prefix cache, if others may find them."""
    request = sim.requests[r]
    blocks = min(tokens // rules.block_size, request.shared_blocks)
    if rules.enable_prefix_caching and blocks > request.cached:
        cache_blocks(sim, rules, r, blocks)


@compilable
def num_certain_tokens(sim: Sim, rules: Rules, r: int, computed: int) -> int:
    """Tokens of decoding request number `r`, `computed` of which are cached, known when its next step is scheduled."""
    return max(sim.requests[r].computed, computed) if rules.async_scheduling else computed + 1


@compilable
def preemption_victim(sim: Sim, rules: Rules) -> int:
    """The number of the running request to preempt: the last, or with priorities the least important one."""
    requests, running, size = sim.requests, sim.running, sim.state[0].num_running
    chosen = running[size - 1]
    if rules.by_priority:
        for i in range(size):
            if requests[running[i]].priority_rank > requests[chosen].priority_rank:
                chosen = running[i]
    return chosen


@compilable
def prefill_chunk(sim: Sim, r: int, threshold: int, budget: int) -> int:
    """Prompt tokens that request number `r` computes now: at most `budget`, and `threshold` (long_prefill) unless 0."""
    wanted = sim.requests[r].tokens - sim.requests[r].computed
    if 0 < threshold < wanted:
        wanted = threshold
    return min(wanted, budget)


@compilable
def schedule_chunk(sim: Sim, rules: Rules, r: int, computed: int, chunk: int) -> None:
    """Schedules the next `chunk` tokens of request number `r`, which has `computed` tokens so far."""
    state, request = sim.state[0], sim.requests[r]
    blocks = -(-(computed + chunk) // rules.block_size)
    if blocks > request.held_blocks:
        state.held_blocks += blocks - request.held_blocks
        take_free_blocks(sim, blocks - request.held_blocks)
        request.held_blocks = blocks
    is_decode = request.state == DECODING
    cache_shared_blocks(sim, rules, r, num_certain_tokens(sim, rules, r, computed) if is_decode else computed + chunk)
    request.chunk = chunk
    request.scheduled_step = state.step
    state.stored += chunk
    state.scheduled_tokens += chunk


@compilable
def schedule_one_by_one(sim: Sim, rules: Rules, threshold: int) -> int:
    """Schedules running requests in order (prefill chunks up to `threshold`), preempting if the pool is full. Returns
    the step's remaining token budget, or `_PREEMPTED`."""
    state, requests, running, bs = sim.state[0], sim.requests, sim.running, rules.block_size
    budget = rules.max_num_batched_tokens
    before = state.preemptions
    index = 0
    while index < state.num_running and budget > 0:
        r = running[index]
        if requests[r].state == FINISHING:
            index += 1
            continue
        if requests[r].state == DECODING:
            computed, chunk = requests[r].step_offset + state.step, 1
            if computed % bs and (requests[r].shared_blocks != ALL_BLOCKS or (computed + 1) % bs):
                # The token fits in a block that the request holds.
                requests[r].chunk = 1
                requests[r].scheduled_step = state.step
                state.stored += 1
                state.scheduled_tokens += 1
                budget -= 1
                index += 1
                continue
            requests[r].held_blocks = -(-computed // bs)
        else:
            computed, chunk = requests[r].computed, prefill_chunk(sim, r, threshold, budget)
        need = -(-(computed + chunk) // bs) - requests[r].held_blocks
        while need > state.free_uncached + state.free_cached:
            victim = preemption_victim(sim, rules)
            if requests[victim].rank < requests[r].rank:
                index -= 1
            if requests[victim].scheduled_step == state.step:
                budget += requests[victim].chunk
            preempt(sim, rules, victim)
            if victim == r:
                break
        if requests[r].state == PREEMPTED:
            break
        schedule_chunk(sim, rules, r, computed, chunk)
        budget -= chunk
        index += 1
    for i in range(state.num_running):
        r = running[i]
        if requests[r].state == DECODING and requests[r].scheduled_step != state.step:
            # It was not scheduled in this step: it finishes one step later.
            stop_decoding(sim, rules, r)
            start_decoding(sim, rules, r, requests[r].step_offset - 1)
            if rules.async_scheduling:
                # Its tokens in flight are known before its next step, which can cache one more.
                requests[r].computed = requests[r].step_offset + state.step + 2
                requests[r].skipped_step = state.step
                cache_shared_blocks(sim, rules, r, requests[r].computed - 1)
    return _PREEMPTED if state.preemptions > before else budget


@compilable
def schedule_in_bulk(sim: Sim, rules: Rules, threshold: int) -> int:
    """Schedules all running requests at once if the pool suffices and prefills come last. Returns the remaining token
    budget, or `_TOO_TIGHT` with nothing scheduled."""
    state, requests, bs = sim.state[0], sim.requests, rules.block_size
    prefills, decodes = state.num_prefills, state.num_decodes
    if prefills and sim.running[state.num_running - prefills] != sim.prefills[0]:
        return _TOO_TIGHT
    free = state.free_uncached + state.free_cached - sim.decodes_by_phase[state.step % bs]
    budget = rules.max_num_batched_tokens - decodes
    for i in range(prefills):
        r = sim.prefills[i]
        chunk = prefill_chunk(sim, r, threshold, budget)
        sim.chunks[i] = chunk
        budget -= chunk
        if chunk:
            free -= -(-(requests[r].computed + chunk) // bs) - requests[r].held_blocks
    if free < 0 or budget < 0:
        return _TOO_TIGHT
    if decodes:
        advance_decodes(sim, rules, 1)
    for i in range(prefills):
        r = sim.prefills[i]
        if sim.chunks[i]:
            schedule_chunk(sim, rules, r, requests[r].computed, sim.chunks[i])
    return budget


@compilable
def advance_decodes(sim: Sim, rules: Rules, steps: int) -> None:
    """Lets every decoding request compute a token in each of `steps` steps; the caller knows that the pool suffices."""
    state, decodes_by_phase, bs = sim.state[0], sim.decodes_by_phase, rules.block_size
    decodes = state.num_decodes
    blocks = steps // bs * decodes
    for offset in range(steps % bs):
        blocks += decodes_by_phase[(state.step + offset) % bs]
    take_free_blocks(sim, blocks)
    state.held_blocks += blocks
    state.stored += steps * decodes
    state.scheduled_tokens += steps * decodes
    if state.shared_decodes:
        advance_shared_decodes(sim, rules, steps)


@compilable
def advance_shared_decodes(sim: Sim, rules: Rules, steps: int) -> None:
    """Caches the blocks that decoding requests fill in `steps` steps, for requests whose blocks others may find."""
    state, requests, running, bs = sim.state[0], sim.requests, sim.running, rules.block_size
    decodes_by_phase = sim.shared_decodes_by_phase
    for step in range(state.step, state.step + steps):
        if not decodes_by_phase[step % bs] and not decodes_by_phase[(step + 1) % bs]:
            continue
        for i in range(state.num_running):
            r = running[i]
            if requests[r].state == DECODING and requests[r].shared_blocks == ALL_BLOCKS:
                computed = requests[r].step_offset + step
                cache_shared_blocks(sim, rules, r, num_certain_tokens(sim, rules, r, computed))


@compilable
def admit_waiting(sim: Sim, rules: Rules, budget: int, threshold: int) -> bool:
    """Admits waiting requests while `budget` (tokens), max_num_seqs and blocks last, in chunks up to `threshold`. True
    if the next one stays out for as long as the coming steps only decode."""
    state, requests, bs = sim.state[0], sim.requests, rules.block_size
    while budget > 0 and state.num_waiting and state.num_running < rules.max_num_seqs:
        r = peek_waiting(sim, rules)
        request = requests[r]
        hit, used = 0, 0
        if rules.enable_prefix_caching:
            hit, used = find_cache_hit(sim, rules, r)
        computed = request.tokens - 1 if rules.remote_prefill and request.preemptions == 0 else hit * bs
        wanted = request.tokens - computed
        if 0 < threshold < wanted:
            wanted = threshold
        if wanted > budget and not rules.enable_chunked_prefill:
            return True
        wanted = min(wanted, budget)
        free = state.free_uncached + state.free_cached
        if state.num_running:
            free -= rules.watermark_blocks
        if rules.reserve_full_isl and -(-request.tokens // bs) - used > free:
            # A decoding request with the same content may cache the blocks that this one would find.
            return request.state != PREEMPTED or request.shared_blocks != ALL_BLOCKS
        if -(-(computed + wanted) // bs) - used > free:
            # Losing some of the hit would make the first chunk end earlier, and fit.
            return hit == 0
        pop_waiting(sim, rules)
        start_running(sim, rules, r, hit, computed)
        schedule_chunk(sim, rules, r, computed, wanted)
        budget -= wanted
    return False


@compilable
def start_running(sim: Sim, rules: Rules, r: int, hit: int, computed: int) -> None:
    """Appends request number `r` to the running list, with `hit` cached blocks and `computed` tokens so far."""
    state, request = sim.state[0], sim.requests[r]
    sim.running[state.num_running] = r
    sim.prefills[state.num_prefills] = r
    state.num_running += 1
    state.num_prefills += 1
    request.rank = state.next_rank
    state.next_rank += 1
    if request.first_sched == NONE:
        request.first_sched = state.step
        request.sched_s = state.now
        state.prompt_tokens += request.prompt
        state.cached_tokens += hit * rules.block_size
    request.state = PREFILLING
    hold_cached_blocks(sim, r, hit)
    request.computed = computed
    state.held_blocks += hit
    state.stored += computed


@compilable
def complete_prefills(sim: Sim, rules: Rules) -> None:
    """Moves requests whose prompt is computed, and which so sampled a token, to the decoding or finishing ones."""
    state, requests = sim.state[0], sim.requests
    kept = 0
    for i in range(state.num_prefills):
        r = sim.prefills[i]
        request = requests[r]
        if request.scheduled_step == state.step:
            state.recomputed_tokens += max(0, min(request.chunk, request.peak - request.computed))
            request.computed += request.chunk
            request.peak = max(request.peak, request.computed)
        complete = request.computed == request.tokens
        if complete:
            request.tokens += 1
            if request.first_token == NONE:
                request.first_token = state.step + rules.async_scheduling
                request.token_s = state.now
        if complete and request.tokens < request.total:
            start_decoding(sim, rules, r, request.computed - state.step - 1)
        elif complete:
            sim.finishing[state.num_finishing] = r
            state.num_finishing += 1
        else:
            sim.prefills[kept] = r
            kept += 1
    state.num_prefills = kept


@compilable
def collect_finishing(sim: Sim, rules: Rules) -> None:
    """Mark the requests that sampled their last token in this step as finishing, in running order."""
    state, requests, finish_order = sim.state[0], sim.requests, sim.finish_order
    after_prefill = state.num_finishing
    while state.num_decodes and last_step(sim, finish_order[state.num_decodes - 1]) == state.step:
        r = finish_order[state.num_decodes - 1]
        stop_decoding(sim, rules, r)
        sim.finishing[state.num_finishing] = r
        state.num_finishing += 1
    if after_prefill and state.num_finishing > 1:
        sort_finishing(sim)
    for i in range(state.num_finishing):
        request = requests[sim.finishing[i]]
        request.state = FINISHING
        # The count of blocks is not updated while decoding.
        request.held_blocks = -(-(request.total - 1) // rules.block_size)
        request.finish = state.step + rules.async_scheduling
        request.finish_s = state.now
        ask_again(sim, rules)


@compilable
def free_finishing(sim: Sim, rules: Rules) -> None:
    """Remove the finishing requests from the running list and free their blocks."""
    state, requests = sim.state[0], sim.requests
    for i in range(state.num_finishing):
        r = sim.finishing[i]
        computed = requests[r].total - 1
        remove_running(sim, r)
        state.held_blocks -= requests[r].held_blocks
        state.stored -= computed
        free_blocks(sim, rules, r, computed // rules.block_size if rules.enable_prefix_caching else 0)
        requests[r].state = DONE
    if state.num_finishing:
        state.blocked = 0
    state.finished += state.num_finishing
    state.num_finishing = 0


@compilable
def complete_step(sim: Sim, rules: Rules) -> None:
    """Ends the step: completes prefills, frees finished requests (with async scheduling a step later), counts it."""
    if rules.async_scheduling:
        free_finishing(sim, rules)
    if sim.state[0].num_prefills:
        complete_prefills(sim, rules)
    collect_finishing(sim, rules)
    if not rules.async_scheduling:
        free_finishing(sim, rules)
    record_step(sim, rules)
    sim.state[0].step += 1


@compilable
def single_step(sim: Sim, rules: Rules, cost: StepCost) -> None:
    """Schedule and run one step, in which requests may be admitted, preempted or finished."""
    state = sim.state[0]
    alone = state.num_running + state.num_waiting <= 1
    threshold = 0 if alone else rules.long_prefill_token_threshold
    was_steady = state.num_prefills == 0
    scheduled_before = state.scheduled_tokens
    budget = schedule_in_bulk(sim, rules, threshold)
    if budget == _TOO_TIGHT:
        budget = schedule_one_by_one(sim, rules, threshold)
    blocked = budget >= 0 and admit_waiting(sim, rules, budget, threshold)
    state.blocked = 1 if blocked and was_steady and state.num_prefills == 0 else 0
    tokens = state.scheduled_tokens - scheduled_before
    if rules.in_seconds and tokens:
        stored, running = state.stored, state.num_running - state.num_finishing
        for i in range(state.num_finishing):
            stored -= sim.requests[sim.finishing[i]].total - 1
        state.now += step_seconds(cost, tokens, stored, running)
    complete_step(sim, rules)


@compilable
def decode_in_bulk(sim: Sim, rules: Rules, cost: StepCost, steps: int) -> None:
    """Runs `steps` decode-only steps; only in the last of them may requests finish."""
    state = sim.state[0]
    ends = state.now
    if rules.in_seconds:
        # Requests that arrive during the last step are queued after it.
        ends += decode_steps_seconds(cost, state.num_running, state.stored + state.num_running, steps)
        state.now += decode_steps_seconds(cost, state.num_running, state.stored + state.num_running, steps - 1)
    if steps > 1:
        record_decode_steps(sim, rules, steps - 1)
    advance_decodes(sim, rules, steps)
    state.step += steps - 1
    enqueue_arrivals(sim, rules)
    state.now = ends
    complete_step(sim, rules)


@compilable
def num_decode_only_steps(sim: Sim, rules: Rules, cost: StepCost) -> int:
    """How many steps from here on only decode; 0 if the next one may admit, preempt or prefill."""
    state = sim.state[0]
    if state.num_running == 0 or state.num_prefills or state.num_finishing:
        return 0
    has_capacity = state.num_running < rules.max_num_seqs and state.num_running < rules.max_num_batched_tokens
    if has_capacity and state.num_waiting and not state.blocked:
        return 0
    steps = last_step(sim, sim.finish_order[state.num_running - 1]) - state.step + 1
    steps = steps_until_pool_full(sim, rules, steps)
    if has_capacity and (rules.by_priority or not state.num_waiting):
        steps = steps_until_arrival(sim, rules, cost, steps)
    return steps


@compilable
def replay(sim: Sim, rules: Rules, cost: StepCost, turns: int) -> bool:
    """Runs up to `turns` turns, each one step or a run of decode-only steps; True while requests are left."""
    state = sim.state[0]
    for _ in range(turns):
        if state.failed:
            return False
        if not state.num_running and not state.num_waiting and not skip_to_next_arrival(sim, rules):
            return False
        enqueue_arrivals(sim, rules)
        steps = num_decode_only_steps(sim, rules, cost)
        if steps > 0:
            decode_in_bulk(sim, rules, cost, steps)
        else:
            single_step(sim, rules, cost)
    return True
