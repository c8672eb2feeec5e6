"""The scheduler over columns: the same decisions as `scheduler.py`, many steps at a time."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from legroom.simulation.fast.columns import (
    ALL_BLOCKS, BLANK, BLOCKED, CACHED, CACHED_TOKENS, DECODING, DONE, FAILED, FINISHED, FINISHING, HELD,
    HELD_SLOT_STEPS, MOST_SAMPLES, NEXT_ARRIVAL, NEXT_RANK, NONE, PEAK_BLOCKS, PEAK_RUNNING, PEAK_WAITING, PREEMPTED,
    PREEMPTIONS, PREFILLING, PREFILLS, PROMPT_TOKENS, QUEUE_HEAD, QUEUED, RECOMPUTED_TOKENS, REJECTED, RUNNING,
    SAMPLE_FIELDS, SAMPLE_WIDTH, SCHEDULED_TOKENS, SHARED_DECODES, STEP, STEPS, STORED, STORED_TOKEN_STEPS,
)  # fmt: skip
from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.pool import (
    adopt, cache_up_to, find_hit, grow, release, take, tell_apart_all, told_apart,
)  # fmt: skip


# ---- the queues ------------------------------------------------------------------------------------------------------


@compilable
def wait(rules, queues, requests, r, comes_back):
    """Queue a request: at the back, at the front if it comes back, or by urgency."""
    counts, queue = queues.counts, queues.queue
    size = len(queue)
    if not rules.by_priority:
        if comes_back:
            counts[QUEUE_HEAD] = (counts[QUEUE_HEAD] - 1) % size
            queue[counts[QUEUE_HEAD]] = r
        else:
            queue[(counts[QUEUE_HEAD] + counts[QUEUED]) % size] = r
        counts[QUEUED] += 1
        return
    place = counts[QUEUED]
    counts[QUEUED] += 1
    urgency = requests.urgency[r]
    while place > 0 and queue[(place - 1) // 2] > urgency:
        queue[place] = queue[(place - 1) // 2]
        place = (place - 1) // 2
    queue[place] = urgency


@compilable
def first_waiting(rules, queues):
    """The request to be admitted next."""
    if rules.by_priority:
        return queues.by_urgency[queues.queue[0]]
    return queues.queue[queues.counts[QUEUE_HEAD]]


@compilable
def leave_queue(rules, queues):
    """Take the first waiting request out."""
    counts, queue = queues.counts, queues.queue
    counts[QUEUED] -= 1
    if not rules.by_priority:
        counts[QUEUE_HEAD] = (counts[QUEUE_HEAD] + 1) % len(queue)
        return
    last = queue[counts[QUEUED]]
    place, size = 0, counts[QUEUED]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and queue[child + 1] < queue[child]:
            child += 1
        if queue[child] >= last:
            break
        queue[place] = queue[child]
        place = child
    queue[place] = last


@compilable
def leave_running(queues, requests, r):
    """Take a request out of the running list, which is ordered by rank."""
    running, size = queues.running, queues.counts[RUNNING]
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if requests.rank[running[middle]] < requests.rank[r]:
            low = middle + 1
        else:
            high = middle
    running[low : size - 1] = running[low + 1 : size].copy()
    queues.counts[RUNNING] -= 1


@compilable
def due_step(requests, r):
    """The step in which a decoding request samples its last token."""
    return requests.total[r] - 2 - requests.base[r]


@compilable
def due_place(queues, requests, r, size):
    """Where `r` stands, or would stand, among those that finish: latest first, of equals the last in line first."""
    step, rank = due_step(requests, r), requests.rank[r]
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        other = queues.due[middle]
        when = due_step(requests, other)
        if when > step or (when == step and requests.rank[other] > rank):
            low = middle + 1
        else:
            high = middle
    return low


@compilable
def start_decoding(rules, queues, requests, r, base, decodes):
    """From the next step on, one token a step, beside the `decodes` requests that do so already."""
    counts = queues.counts
    requests.base[r] = base
    requests.state[r] = DECODING
    place = due_place(queues, requests, r, decodes)
    queues.due[place + 1 : decodes + 1] = queues.due[place:decodes].copy()
    queues.due[place] = r
    phase = -base % rules.block_size
    queues.phases[phase] += 1
    if requests.shared_blocks[r] == ALL_BLOCKS:
        queues.shared_phases[phase] += 1
        counts[SHARED_DECODES] += 1


@compilable
def stop_decoding(rules, queues, requests, r, decodes):
    """Take `r` out of the `decodes` requests that decode."""
    place = due_place(queues, requests, r, decodes)
    queues.due[place : decodes - 1] = queues.due[place + 1 : decodes].copy()
    phase = -requests.base[r] % rules.block_size
    queues.phases[phase] -= 1
    if requests.shared_blocks[r] == ALL_BLOCKS:
        queues.shared_phases[phase] -= 1
        queues.counts[SHARED_DECODES] -= 1


@compilable
def drop_prefill(queues, r):
    """Take `r` out of the requests that prefill."""
    counts, prefills = queues.counts, queues.prefills
    place = 0
    while prefills[place] != r:
        place += 1
    for i in range(place, counts[PREFILLS] - 1):
        prefills[i] = prefills[i + 1]
    counts[PREFILLS] -= 1


# ---- books -----------------------------------------------------------------------------------------------------------


@compilable
def sample(rules, queues, books, pool, first_step, steps, used):
    """The worst of each stretch of steps; when the points run out, stretches double."""
    totals, samples, counts = books.totals, books.samples, queues.counts
    last = first_step + steps - 1
    while last // totals[SAMPLE_WIDTH] >= MOST_SAMPLES:
        for i in range(MOST_SAMPLES // 2):
            for field in range(SAMPLE_FIELDS):
                one = samples[2 * i * SAMPLE_FIELDS + field]
                other = samples[(2 * i + 1) * SAMPLE_FIELDS + field]
                samples[i * SAMPLE_FIELDS + field] = max(one, other)
        for i in range(MOST_SAMPLES // 2 * SAMPLE_FIELDS, MOST_SAMPLES * SAMPLE_FIELDS):
            samples[i] = NONE
        totals[SAMPLE_WIDTH] *= 2
    width = totals[SAMPLE_WIDTH]
    for stretch in range(first_step // width, last // width + 1):
        place = stretch * SAMPLE_FIELDS
        samples[place] = max(samples[place], used)
        samples[place + 1] = max(samples[place + 1], counts[RUNNING])
        samples[place + 2] = max(samples[place + 2], counts[QUEUED])


@compilable
def close_step(rules, queues, books, pool):
    """Book the end of the current step."""
    totals, counts = books.totals, queues.counts
    used = rules.usable_blocks - pool.counts[BLANK] - pool.counts[CACHED]
    totals[STEPS] += 1
    totals[PEAK_BLOCKS] = max(totals[PEAK_BLOCKS], used)
    totals[PEAK_RUNNING] = max(totals[PEAK_RUNNING], counts[RUNNING])
    totals[PEAK_WAITING] = max(totals[PEAK_WAITING], counts[QUEUED])
    totals[HELD_SLOT_STEPS] += counts[HELD] * rules.block_size
    totals[STORED_TOKEN_STEPS] += counts[STORED]
    sample(rules, queues, books, pool, counts[STEP], 1, used)


@compilable
def span_seconds(cost, running, stored, steps):
    """Seconds of `steps` steps in which `running` requests decode one token each."""
    compute = cost.token * running
    # Reading the cache grows by `running` tokens a step; from step `turn` on it takes longer than computing.
    turn = 0.0
    if cost.kv_token > 0.0 and running > 0:
        turn = (compute - cost.weights - cost.kv_token * stored) / (cost.kv_token * running)
    elif compute > cost.weights:
        turn = float(steps)
    early = min(max(0, int(turn) + 1 if turn > 0 else 0), steps)
    late = steps - early
    read = late * (cost.weights + cost.kv_token * stored)
    read += cost.kv_token * running * (late * early + late * (late - 1) / 2.0)
    return steps * cost.overhead + early * compute + read


# ---- one step --------------------------------------------------------------------------------------------------------


@compilable
def preempt(rules, queues, books, pool, requests, streams, r):
    """Throw a running request out: its blocks go back, its tokens will be computed again."""
    counts, bs = queues.counts, rules.block_size
    step = counts[STEP]
    if requests.state[r] == DECODING:
        computed = requests.base[r] + step
        requests.tokens[r] = computed + 1
        stop_decoding(rules, queues, requests, r, counts[RUNNING] - counts[PREFILLS])
    else:
        computed = requests.computed[r]
        drop_prefill(queues, r)
    requests.peak[r] = max(requests.peak[r], computed)
    cacheable = computed
    if requests.stamp[r] == step:
        cacheable += requests.chunk[r]
        counts[STORED] -= requests.chunk[r]
        books.totals[SCHEDULED_TOKENS] -= requests.chunk[r]
        requests.stamp[r] = NONE
    leave_running(queues, requests, r)
    counts[HELD] -= requests.held[r]
    counts[STORED] -= computed
    cached_blocks = cacheable // bs if rules.caching else 0
    if cached_blocks > (requests.tokens[r] - 1) // bs and requests.shared_blocks[r] != ALL_BLOCKS:
        tell_apart_all(pool, requests, streams, rules.row_width, r, cached_blocks, rules.own_streams + r)
    release(pool, requests, rules.row_width, r, cached_blocks, r)
    requests.computed[r] = 0
    requests.state[r] = PREEMPTED
    requests.preemptions[r] += 1
    books.totals[PREEMPTIONS] += 1
    wait(rules, queues, requests, r, True)


@compilable
def victim(rules, queues, requests):
    """The last in line, or the least urgent."""
    running, size = queues.running, queues.counts[RUNNING]
    chosen = running[size - 1]
    if rules.by_priority:
        for i in range(size):
            if requests.urgency[running[i]] > requests.urgency[chosen]:
                chosen = running[i]
    return chosen


@compilable
def chunk_of(rules, requests, r, threshold, budget):
    """Tokens that a prefilling request gets."""
    wanted = requests.tokens[r] - requests.computed[r]
    if 0 < threshold < wanted:
        wanted = threshold
    return min(wanted, budget)


@compilable
def hold_chunk(rules, queues, books, pool, requests, streams, r, chunk):
    """Book `chunk` more tokens of a prefilling request."""
    counts, totals, bs = queues.counts, books.totals, rules.block_size
    computed = requests.computed[r]
    blocks = -(-(computed + chunk) // bs)
    counts[HELD] += blocks - requests.held[r]
    grow(pool, requests, rules.row_width, r, blocks)
    if rules.caching:
        cache_up_to(pool, requests, streams, rules.row_width, r, (computed + chunk) // bs)
    requests.chunk[r] = chunk
    requests.stamp[r] = counts[STEP]
    counts[STORED] += chunk
    totals[SCHEDULED_TOKENS] += chunk


@compilable
def hold_decode_token(rules, queues, books, pool, requests, streams, r):
    """Book one more token of a decoding request in the slow path."""
    counts, bs = queues.counts, rules.block_size
    computed = requests.base[r] + counts[STEP]
    if computed % bs == 0:
        counts[HELD] += 1
        grow(pool, requests, rules.row_width, r, computed // bs + 1)
    if rules.caching and (computed + 1) % bs == 0:
        cache_up_to(pool, requests, streams, rules.row_width, r, (computed + 1) // bs)
    requests.chunk[r] = 1
    requests.stamp[r] = counts[STEP]
    counts[STORED] += 1
    books.totals[SCHEDULED_TOKENS] += 1


@compilable
def run_slowly(rules, queues, books, pool, requests, streams, threshold):
    """The running requests one by one, with preemption where the pool runs dry. The budget left, or -1 if it did."""
    counts, bs = queues.counts, rules.block_size
    budget = rules.max_num_batched_tokens
    before = books.totals[PREEMPTIONS]
    step = counts[STEP]
    index = 0
    gave_up = False
    while index < counts[RUNNING] and budget > 0 and not gave_up:
        r = queues.running[index]
        if requests.state[r] == DECODING:
            chunk = 1
            need = 1 if (requests.base[r] + step) % bs == 0 else 0
        else:
            chunk = chunk_of(rules, requests, r, threshold, budget)
            need = -(-(requests.computed[r] + chunk) // bs) - requests.held[r]
        while need > pool.counts[BLANK] + pool.counts[CACHED]:
            thrown = victim(rules, queues, requests)
            if requests.rank[thrown] < requests.rank[r]:
                index -= 1
            if requests.stamp[thrown] == step:
                budget += requests.chunk[thrown]
            preempt(rules, queues, books, pool, requests, streams, thrown)
            if thrown == r:
                gave_up = True
                break
        if gave_up:
            break
        if requests.state[r] == DECODING:
            hold_decode_token(rules, queues, books, pool, requests, streams, r)
        else:
            hold_chunk(rules, queues, books, pool, requests, streams, r, chunk)
        budget -= chunk
        index += 1
    for i in range(counts[RUNNING]):
        r = queues.running[i]
        if requests.state[r] == DECODING and requests.stamp[r] != step:
            stand_still(rules, queues, requests, r)
    return -1 if books.totals[PREEMPTIONS] > before else budget


@compilable
def stand_still(rules, queues, requests, r):
    """A decoding request got nothing in this step: all its dates move by one."""
    decodes = queues.counts[RUNNING] - queues.counts[PREFILLS]
    stop_decoding(rules, queues, requests, r, decodes)
    start_decoding(rules, queues, requests, r, requests.base[r] - 1, decodes - 1)


@compilable
def run_at_once(rules, queues, books, pool, requests, streams, threshold):
    """The running requests if nobody need be preempted: the budget left, or -2 if that is not so."""
    counts, bs = queues.counts, rules.block_size
    prefills = counts[PREFILLS]
    decodes = counts[RUNNING] - prefills
    if prefills and queues.running[decodes] != queues.prefills[0]:
        return -2
    step = counts[STEP]
    free = pool.counts[BLANK] + pool.counts[CACHED] - queues.phases[step % bs]
    budget = rules.max_num_batched_tokens - decodes
    if free < 0 or budget < 0:
        return -2
    left = budget
    for i in range(prefills):
        r = queues.prefills[i]
        chunk = chunk_of(rules, requests, r, threshold, left)
        queues.needs[i] = chunk
        left -= chunk
        if chunk:
            free -= -(-(requests.computed[r] + chunk) // bs) - requests.held[r]
        if free < 0:
            return -2
    if decodes:
        advance_decodes(rules, queues, books, pool, requests, streams, 1)
    for i in range(prefills):
        if queues.needs[i]:
            hold_chunk(rules, queues, books, pool, requests, streams, queues.prefills[i], queues.needs[i])
    return left


@compilable
def advance_decodes(rules, queues, books, pool, requests, streams, steps):
    """Every decoding request computes one token in each of `steps` steps; the pool is known to suffice."""
    counts, bs = queues.counts, rules.block_size
    step = counts[STEP]
    decodes = counts[RUNNING] - counts[PREFILLS]
    blocks = steps // bs * decodes
    for offset in range(steps % bs):
        blocks += queues.phases[(step + offset) % bs]
    take(pool, requests, blocks)
    counts[HELD] += blocks
    counts[STORED] += steps * decodes
    books.totals[SCHEDULED_TOKENS] += steps * decodes
    if counts[SHARED_DECODES]:
        advance_shared(rules, queues, pool, requests, streams, steps)


@compilable
def advance_shared(rules, queues, pool, requests, streams, steps):
    """Blocks that are told apart get their identity when taken, and can be found when full, in the order of time."""
    counts, bs, width = queues.counts, rules.block_size, rules.row_width
    for step in range(counts[STEP], counts[STEP] + steps):
        if not queues.shared_phases[step % bs] and not queues.shared_phases[(step + 1) % bs]:
            continue
        for i in range(counts[RUNNING]):
            r = queues.running[i]
            if requests.state[r] != DECODING or requests.shared_blocks[r] != ALL_BLOCKS:
                continue
            computed = requests.base[r] + step
            if computed % bs == 0:
                pool.table[requests.slot[r] * width + computed // bs] = told_apart(pool)
                requests.held[r] = computed // bs + 1
            if (computed + 1) % bs == 0:
                cache_up_to(pool, requests, streams, width, r, (computed + 1) // bs)


@compilable
def admit(rules, queues, books, pool, requests, streams, budget, threshold):
    """Admit waiting requests while budget, seats and blocks last. True if the first one must wait for a change."""
    counts, totals, bs = queues.counts, books.totals, rules.block_size
    while budget > 0 and counts[QUEUED] and counts[RUNNING] < rules.max_num_seqs:
        r = first_waiting(rules, queues)
        hit, used = find_hit(pool, requests, streams, bs, r) if rules.caching else (0, 0)
        wanted = requests.tokens[r] - hit * bs
        if 0 < threshold < wanted:
            wanted = threshold
        if wanted > budget and not rules.chunked:
            return True
        wanted = min(wanted, budget)
        free = pool.counts[BLANK] + pool.counts[CACHED]
        if counts[RUNNING]:
            free -= rules.watermark_blocks
        if rules.reserve_full and -(-requests.tokens[r] // bs) - used > free:
            # A twin that decodes may cache the very blocks that this one would find.
            return not (requests.state[r] == PREEMPTED and requests.shared_blocks[r] == ALL_BLOCKS)
        if -(-(hit * bs + wanted) // bs) - used > free:
            return not hit
        leave_queue(rules, queues)
        queues.running[counts[RUNNING]] = r
        queues.prefills[counts[PREFILLS]] = r
        counts[RUNNING] += 1
        counts[PREFILLS] += 1
        requests.rank[r] = counts[NEXT_RANK]
        counts[NEXT_RANK] += 1
        if requests.first_sched[r] == NONE:
            requests.first_sched[r] = counts[STEP]
            totals[PROMPT_TOKENS] += requests.prompt[r]
            totals[CACHED_TOKENS] += hit * bs
            if rules.in_seconds:
                books.sched_s[r] = books.clock[0]
        requests.state[r] = PREFILLING
        adopt(pool, requests, rules.row_width, r, hit)
        requests.computed[r] = hit * bs
        counts[HELD] += hit
        counts[STORED] += hit * bs
        hold_chunk(rules, queues, books, pool, requests, streams, r, wanted)
        budget -= wanted
    return False


@compilable
def settle_prefills(rules, queues, books, requests):
    """The step has run: prompts that are complete have sampled their first token."""
    counts, totals = queues.counts, books.totals
    step = counts[STEP]
    kept = 0
    decodes = counts[RUNNING] - counts[PREFILLS]
    for i in range(counts[PREFILLS]):
        r = queues.prefills[i]
        if requests.stamp[r] == step:
            chunk, computed = requests.chunk[r], requests.computed[r]
            totals[RECOMPUTED_TOKENS] += max(0, min(chunk, requests.peak[r] - computed))
            requests.computed[r] = computed + chunk
            requests.peak[r] = max(requests.peak[r], computed + chunk)
        if requests.computed[r] < requests.tokens[r]:
            queues.prefills[kept] = r
            kept += 1
            continue
        if requests.first_token[r] == NONE:
            requests.first_token[r] = step
        requests.tokens[r] += 1
        if requests.tokens[r] >= requests.total[r]:
            queues.finishing[counts[FINISHING]] = r
            counts[FINISHING] += 1
            # It stands among the prefills until it is freed.
            queues.prefills[kept] = r
            kept += 1
            continue
        start_decoding(rules, queues, requests, r, requests.computed[r] - step - 1, decodes)
        decodes += 1
    counts[PREFILLS] = kept


@compilable
def finish_due(rules, queues, books, pool, requests):
    """Free those that sampled their last token, in running order."""
    counts, bs = queues.counts, rules.block_size
    step = counts[STEP]
    decodes = counts[RUNNING] - counts[PREFILLS]
    prefill_ends = counts[FINISHING]
    while decodes and due_step(requests, queues.due[decodes - 1]) == step:
        decodes -= 1
        queues.finishing[counts[FINISHING]] = queues.due[decodes]
        counts[FINISHING] += 1
    if prefill_ends and counts[FINISHING] > 1:
        sort_by_rank(queues, requests)
    for i in range(counts[FINISHING]):
        r = queues.finishing[i]
        if requests.state[r] == DECODING:
            stop_decoding(rules, queues, requests, r, counts[RUNNING] - counts[PREFILLS])
            # The counted blocks were not booked one by one.
            requests.held[r] = -(-(requests.total[r] - 1) // bs)
        else:
            drop_prefill(queues, r)
        leave_running(queues, requests, r)
        computed = requests.total[r] - 1
        counts[HELD] -= requests.held[r]
        counts[STORED] -= computed
        release(pool, requests, rules.row_width, r, computed // bs if rules.caching else 0, NONE)
        requests.state[r] = DONE
        requests.finish[r] = step
        if rules.in_seconds:
            books.finish_s[r] = books.clock[0]
        books.totals[FINISHED] += 1
    ended = counts[FINISHING]
    counts[FINISHING] = 0
    return ended


@compilable
def sort_by_rank(queues, requests):
    """Those that finish, in running order; there are few."""
    finishing = queues.finishing
    for i in range(1, queues.counts[FINISHING]):
        r = finishing[i]
        place = i
        while place and requests.rank[finishing[place - 1]] > requests.rank[r]:
            finishing[place] = finishing[place - 1]
            place -= 1
        finishing[place] = r


@compilable
def book_decode_blocks(rules, queues, requests):
    """Write down the blocks of decoding requests before the slow path looks at them one by one."""
    for i in range(queues.counts[RUNNING]):
        r = queues.running[i]
        if requests.state[r] == DECODING:
            requests.held[r] = -(-(requests.base[r] + queues.counts[STEP]) // rules.block_size)


@compilable
def one_step(rules, cost, queues, books, pool, requests, streams):
    """A step in which something may be decided."""
    counts, totals = queues.counts, books.totals
    alone = counts[RUNNING] + counts[QUEUED] <= 1
    threshold = 0 if alone else rules.threshold
    was_steady = counts[PREFILLS] == 0
    scheduled_before = totals[SCHEDULED_TOKENS]
    budget = run_at_once(rules, queues, books, pool, requests, streams, threshold)
    if budget == -2:
        book_decode_blocks(rules, queues, requests)
        budget = run_slowly(rules, queues, books, pool, requests, streams, threshold)
    blocked = False
    if budget >= 0:
        blocked = admit(rules, queues, books, pool, requests, streams, budget, threshold)
    counts[BLOCKED] = 1 if blocked and was_steady and counts[PREFILLS] == 0 else 0
    started = counts[PREFILLS]
    if rules.in_seconds:
        tokens = totals[SCHEDULED_TOKENS] - scheduled_before
        read = cost.weights + cost.kv_token * counts[STORED]
        books.clock[0] += cost.overhead + max(cost.token * tokens, read)
    if started:
        if rules.in_seconds:
            for i in range(started):
                r = queues.prefills[i]
                complete = requests.stamp[r] == counts[STEP]
                complete = complete and requests.computed[r] + requests.chunk[r] >= requests.tokens[r]
                if complete and requests.first_token[r] == NONE:
                    books.token_s[r] = books.clock[0]
        settle_prefills(rules, queues, books, requests)
    if finish_due(rules, queues, books, pool, requests):
        counts[BLOCKED] = 0
    close_step(rules, queues, books, pool)
    counts[STEP] += 1


# ---- many steps ------------------------------------------------------------------------------------------------------


@compilable
def steps_until_dry(rules, queues, free, most):
    """How many steps the decoding requests can take before the pool cannot give a block; at most `most`."""
    counts, bs = queues.counts, rules.block_size
    decodes = counts[RUNNING]
    cycles = free // decodes
    steps = cycles * bs
    if steps >= most:
        return most
    free -= cycles * decodes
    for offset in range(bs):
        free -= queues.phases[(counts[STEP] + offset) % bs]
        if free < 0:
            break
        steps += 1
    return min(steps, most)


@compilable
def steps_until_arrival(rules, cost, queues, books, requests, most):
    """How many steps begin before the next request arrives; at most `most`."""
    counts = queues.counts
    upcoming = counts[NEXT_ARRIVAL]
    if upcoming >= len(requests.arrival):
        return most
    arrival = requests.arrival[upcoming]
    if not rules.in_seconds:
        return min(most, int(arrival) - counts[STEP])
    low, high = 0, most
    # The first step that begins at or after the arrival.
    while low < high:
        middle = (low + high) // 2
        begins = books.clock[0] + span_seconds(cost, counts[RUNNING], counts[STORED] + counts[RUNNING], middle)
        if begins >= arrival:
            high = middle
        else:
            low = middle + 1
    return low


@compilable
def jump(rules, cost, queues, books, pool, requests, streams, steps):
    """Take `steps` steps of pure decoding; requests may finish in the last of them."""
    counts, totals, bs = queues.counts, books.totals, rules.block_size
    first = counts[STEP]
    decodes = counts[RUNNING]
    held, stored = counts[HELD], counts[STORED]
    if rules.in_seconds:
        books.clock[0] += span_seconds(cost, decodes, stored + decodes, steps)
    quiet = steps - 1
    if quiet:
        # At the ends of all steps but the last: tokens grow by one a request, blocks by those whose turn it is.
        slots = held * quiet
        blocks = 0
        for offset in range(min(bs, quiet)):
            here = queues.phases[(first + offset) % bs]
            turns = (quiet - offset + bs - 1) // bs
            slots += here * (turns * (quiet - offset) - bs * turns * (turns - 1) // 2)
            blocks += here * turns
        totals[HELD_SLOT_STEPS] += slots * bs
        totals[STORED_TOKEN_STEPS] += stored * quiet + decodes * (quiet * (quiet + 1) // 2)
        totals[STEPS] += quiet
        used = rules.usable_blocks - pool.counts[BLANK] - pool.counts[CACHED] + blocks
        totals[PEAK_BLOCKS] = max(totals[PEAK_BLOCKS], used)
        totals[PEAK_RUNNING] = max(totals[PEAK_RUNNING], decodes)
        sample(rules, queues, books, pool, first, quiet, used)
    advance_decodes(rules, queues, books, pool, requests, streams, steps)
    counts[STEP] = first + steps - 1
    arrive(rules, queues, books, requests)
    if finish_due(rules, queues, books, pool, requests):
        counts[BLOCKED] = 0
    close_step(rules, queues, books, pool)
    counts[STEP] += 1


@compilable
def arrive(rules, queues, books, requests):
    """Queue everybody who has arrived by the current step."""
    counts = queues.counts
    now = books.clock[0] if rules.in_seconds else float(counts[STEP])
    upcoming = counts[NEXT_ARRIVAL]
    while upcoming < len(requests.arrival) and requests.arrival[upcoming] <= now:
        if requests.state[upcoming] != REJECTED:
            wait(rules, queues, requests, upcoming, False)
            if rules.by_priority:
                counts[BLOCKED] = 0
        upcoming += 1
    counts[NEXT_ARRIVAL] = upcoming


@compilable
def skip_idle(rules, queues, books, requests):
    """Nothing runs and nobody waits: go to the next arrival. False if there is none."""
    counts = queues.counts
    upcoming = counts[NEXT_ARRIVAL]
    while upcoming < len(requests.arrival) and requests.state[upcoming] == REJECTED:
        upcoming += 1
    counts[NEXT_ARRIVAL] = upcoming
    if upcoming >= len(requests.arrival):
        return False
    if rules.in_seconds:
        books.clock[0] = max(books.clock[0], requests.arrival[upcoming])
    else:
        counts[STEP] = max(counts[STEP], int(requests.arrival[upcoming]))
    return True


@compilable
def replay(rules, cost, queues, books, pool, requests, streams, turns):
    """Go on for `turns` events. True while there is more to do."""
    counts = queues.counts
    for _ in range(turns):
        if not counts[RUNNING] and not counts[QUEUED] and not skip_idle(rules, queues, books, requests):
            return False
        arrive(rules, queues, books, requests)
        if pool.counts[FAILED]:
            return False
        steps = 0
        if counts[RUNNING] and not counts[PREFILLS]:
            seats = counts[RUNNING] < rules.max_num_seqs and counts[RUNNING] < rules.max_num_batched_tokens
            if not seats or not counts[QUEUED] or counts[BLOCKED]:
                steps = due_step(requests, queues.due[counts[RUNNING] - 1]) - counts[STEP] + 1
                free = pool.counts[BLANK] + pool.counts[CACHED]
                steps = steps_until_dry(rules, queues, free, steps)
                if seats and (rules.by_priority or not counts[QUEUED]):
                    steps = steps_until_arrival(rules, cost, queues, books, requests, steps)
        if steps > 0:
            jump(rules, cost, queues, books, pool, requests, streams, steps)
        else:
            one_step(rules, cost, queues, books, pool, requests, streams)
    return True
