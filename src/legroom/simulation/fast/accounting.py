"""Totals and samples of a step, the seconds that steps take, and the number of steps until the next event."""
# mypy: disable-error-code="no-any-return"

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import MAX_SAMPLES, NONE, Rules, Sim, StepCost


@compilable
def double_sample_width(sim: Sim) -> None:
    """Merges each two neighbouring samples, so that a sample covers twice as many steps."""
    state, samples = sim.state[0], sim.samples
    half = MAX_SAMPLES // 2
    for i in range(half):
        left, right = samples[2 * i], samples[2 * i + 1]
        used, running = max(left.used, right.used), max(left.running, right.running)
        waiting = max(left.waiting, right.waiting)
        samples[i].used, samples[i].running, samples[i].waiting = used, running, waiting
        samples[i].preempted = max(left.preempted, right.preempted)
    for i in range(half, MAX_SAMPLES):
        samples[i].used = samples[i].running = samples[i].waiting = NONE
        samples[i].preempted = 0
    state.sample_width *= 2


@compilable
def sample(sim: Sim, first_step: int, steps: int, used: int) -> None:
    """Adds `steps` steps from number `first_step` on, with `used` blocks in use, to the samples that cover them."""
    state, samples = sim.state[0], sim.samples
    last = first_step + steps - 1
    while last // state.sample_width >= MAX_SAMPLES:
        double_sample_width(sim)
    for stretch in range(first_step // state.sample_width, last // state.sample_width + 1):
        point = samples[stretch]
        point.used = max(point.used, used)
        point.running = max(point.running, state.num_running)
        point.waiting = max(point.waiting, state.num_waiting)
        point.preempted = state.preemptions


@compilable
def record_step(sim: Sim, rules: Rules) -> None:
    """Adds the step that was just run to the totals in `sim.state`: tokens, blocks, running and waiting requests."""
    state = sim.state[0]
    used = rules.usable_blocks - state.free_uncached - state.free_cached
    state.steps += 1
    state.peak_blocks = max(state.peak_blocks, used)
    state.peak_running = max(state.peak_running, state.num_running)
    state.peak_waiting = max(state.peak_waiting, state.num_waiting)
    state.held_slot_steps += state.held_blocks * rules.block_size
    state.stored_token_steps += state.stored
    sample(sim, state.step, 1, used)


@compilable
def record_decode_steps(sim: Sim, rules: Rules, steps: int) -> None:
    """Adds the next `steps` decode-only steps to the totals: a token per request and step, and the blocks for these."""
    state, decodes_by_phase, bs = sim.state[0], sim.decodes_by_phase, rules.block_size
    decodes = state.num_running
    held_steps = state.held_blocks * steps
    blocks = 0
    for offset in range(min(bs, steps)):
        here = decodes_by_phase[(state.step + offset) % bs]
        turns = (steps - offset + bs - 1) // bs
        held_steps += here * (turns * (steps - offset) - bs * turns * (turns - 1) // 2)
        blocks += here * turns
    state.held_slot_steps += held_steps * bs
    state.stored_token_steps += state.stored * steps + decodes * (steps * (steps + 1) // 2)
    state.steps += steps
    used = rules.usable_blocks - state.free_uncached - state.free_cached + blocks
    state.peak_blocks = max(state.peak_blocks, used)
    state.peak_running = max(state.peak_running, decodes)
    sample(sim, state.step, steps, used)


@compilable
def expert_read_seconds(cost: StepCost, tokens: float) -> float:
    """Seconds to read the weights of the experts that any of `tokens` tokens is routed to."""
    return cost.experts * (1.0 - cost.idle**tokens**cost.choice_exponent)


@compilable
def kv_read_seconds(cost: StepCost, stored: float, running: float) -> float:
    """Seconds to read the KV cache of `running` requests: `stored` tokens; sliding layers at most a window of each."""
    return cost.kv_token * stored + cost.window_token * min(stored, cost.window * running)


@compilable
def min_host_seconds(cost: StepCost, tokens: float, running: float) -> float:
    """The least seconds of a step with `tokens` tokens of `running` requests, as the host must launch its kernels."""
    if tokens <= running:
        return cost.host + cost.host_request * running
    return cost.launch_captured if tokens <= cost.captured else cost.launch


@compilable
def step_seconds(cost: StepCost, tokens: float, stored: float, running: float) -> float:
    """Seconds of a step that computes `tokens` and reads `stored` cached tokens of `running` requests."""
    compute = cost.token * tokens
    if tokens > running > 0:
        # A prompt token attends on average to the tokens its request holds, less half of the new ones.
        seen = (stored - 0.5 * tokens) / running
        compute += (tokens - running) * (cost.pair * seen + cost.window_pair * min(seen, cost.window))
    read = cost.weights + kv_read_seconds(cost, stored, running)
    busy = cost.overhead + cost.request * running + cost.exchange * tokens + max(compute, read)
    return max(busy + expert_read_seconds(cost, tokens), min_host_seconds(cost, tokens, running))


@compilable
def decode_steps_seconds(cost: StepCost, running: float, stored: float, steps: int) -> float:
    """Seconds of `steps` steps in which each of `running` requests decodes a token; the first reads `stored` tokens."""
    overhead = cost.overhead + (cost.request + cost.exchange) * running + expert_read_seconds(cost, running)
    # The part that does not grow with the cache: computing, or the host where it is slower than that.
    even = max(cost.token * running, min_host_seconds(cost, running, running) - overhead)
    growing = 0
    if cost.window_token > 0.0 and stored < cost.window * running:
        growing = min(steps, int(cost.window - stored / running) + 1)
    per_token = cost.kv_token + cost.window_token
    busy = slower_of_steps_seconds(even, cost.weights + per_token * stored, per_token * running, growing)
    read = cost.weights + kv_read_seconds(cost, stored + growing * running, running)
    busy += slower_of_steps_seconds(even, read, cost.kv_token * running, steps - growing)
    return steps * overhead + busy


@compilable
def slower_of_steps_seconds(even: float, read: float, growth: float, steps: int) -> float:
    """Seconds of `steps` steps, where step i (from 0) takes the longer of `even` and `read + i * growth` seconds."""
    turn = -1.0
    if even > read:
        turn = float(steps)
        if growth > 0.0:
            turn = (even - read) / growth
    early = min(int(turn) + 1, steps) if turn >= 0.0 else 0
    late = steps - early
    return early * even + late * read + growth * (late * early + late * (late - 1) / 2.0)


@compilable
def steps_until_pool_full(sim: Sim, rules: Rules, max_steps: int) -> int:
    """How many more decode-only steps (at most `max_steps`) the free blocks of the pool suffice for."""
    state, decodes_by_phase, bs = sim.state[0], sim.decodes_by_phase, rules.block_size
    free = state.free_uncached + state.free_cached
    cycles = free // state.num_running
    steps = cycles * bs
    if steps >= max_steps:
        return max_steps
    free -= cycles * state.num_running
    for offset in range(bs):
        free -= decodes_by_phase[(state.step + offset) % bs]
        if free < 0:
            break
        steps += 1
    return min(steps, max_steps)


@compilable
def steps_until_arrival(sim: Sim, rules: Rules, cost: StepCost, max_steps: int) -> int:
    """How many decode-only steps (at most `max_steps`) begin before the next request arrives."""
    state = sim.state[0]
    if state.next_arrival >= rules.num_requests:
        return max_steps
    arrival = sim.requests[state.next_arrival].arrival
    if not rules.in_seconds:
        return min(max_steps, int(arrival) - state.step)
    low, high = 0, max_steps
    while low < high:
        middle = (low + high) // 2
        begins = state.now + decode_steps_seconds(cost, state.num_running, state.stored + state.num_running, middle)
        if begins >= arrival:
            high = middle
        else:
            low = middle + 1
    return low
