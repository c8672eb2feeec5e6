"""What is written down at the end of a step, how long steps take, and how many come before the next event."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import MOST_SAMPLES, NONE


@compilable
def double_stretches(sim):
    """Make room for more steps: every point stands for twice as many."""
    state, samples = sim.state[0], sim.samples
    half = MOST_SAMPLES // 2
    for i in range(half):
        left, right = samples[2 * i], samples[2 * i + 1]
        used, running = max(left.used, right.used), max(left.running, right.running)
        waiting = max(left.waiting, right.waiting)
        samples[i].used, samples[i].running, samples[i].waiting = used, running, waiting
        samples[i].preempted = max(left.preempted, right.preempted)
    for i in range(half, MOST_SAMPLES):
        samples[i].used = samples[i].running = samples[i].waiting = NONE
        samples[i].preempted = 0
    state.sample_width *= 2


@compilable
def sample(sim, first_step, steps, used):
    """The worst of each stretch of steps; when the points run out, stretches double."""
    state, samples = sim.state[0], sim.samples
    last = first_step + steps - 1
    while last // state.sample_width >= MOST_SAMPLES:
        double_stretches(sim)
    for stretch in range(first_step // state.sample_width, last // state.sample_width + 1):
        point = samples[stretch]
        point.used = max(point.used, used)
        point.running = max(point.running, state.num_running)
        point.waiting = max(point.waiting, state.num_waiting)
        point.preempted = state.preemptions


@compilable
def close_step(sim, rules):
    """Book the end of the current step."""
    state = sim.state[0]
    used = rules.usable_blocks - state.blank - state.cached
    state.steps += 1
    state.peak_blocks = max(state.peak_blocks, used)
    state.peak_running = max(state.peak_running, state.num_running)
    state.peak_waiting = max(state.peak_waiting, state.num_waiting)
    state.held_slot_steps += state.held_blocks * rules.block_size
    state.stored_token_steps += state.stored
    sample(sim, state.step, 1, used)


@compilable
def close_quiet_steps(sim, rules, quiet):
    """Book the ends of `quiet` steps to come: tokens grow by one a request, blocks by those whose turn it is."""
    state, seats, bs = sim.state[0], sim.seats, rules.block_size
    decodes = state.num_running
    held_steps = state.held_blocks * quiet
    blocks = 0
    for offset in range(min(bs, quiet)):
        here = seats[(state.step + offset) % bs].decodes
        turns = (quiet - offset + bs - 1) // bs
        held_steps += here * (turns * (quiet - offset) - bs * turns * (turns - 1) // 2)
        blocks += here * turns
    state.held_slot_steps += held_steps * bs
    state.stored_token_steps += state.stored * quiet + decodes * (quiet * (quiet + 1) // 2)
    state.steps += quiet
    used = rules.usable_blocks - state.blank - state.cached + blocks
    state.peak_blocks = max(state.peak_blocks, used)
    state.peak_running = max(state.peak_running, decodes)
    sample(sim, state.step, quiet, used)


@compilable
def weights_seconds(cost, tokens):
    """Seconds to read the weights: of the experts, those that any of the tokens chooses."""
    return cost.weights + cost.experts * (1.0 - cost.idle**tokens)


@compilable
def least_seconds(cost, tokens, running):
    """Seconds that the host needs for a step, however little the GPU has to do."""
    if tokens <= running:
        return cost.host + cost.host_request * running
    return cost.launch_captured if tokens <= cost.captured else cost.launch


@compilable
def step_seconds(cost, tokens, stored, running):
    """Seconds of one step: the slower of computing and reading memory."""
    compute = cost.token * tokens
    if tokens > running > 0:
        # Tokens of prompts attend to what is before them: on average what a request holds, less half of its new ones.
        compute += cost.pair * (tokens - running) * (stored - 0.5 * tokens) / running
    read = weights_seconds(cost, tokens) + cost.kv_token * stored
    busy = cost.overhead + cost.request * running + cost.exchange * tokens + max(compute, read)
    return max(busy, least_seconds(cost, tokens, running))


@compilable
def span_seconds(cost, running, stored, steps):
    """Seconds of `steps` steps in which `running` requests decode a token each; the first reads `stored` tokens."""
    overhead = cost.overhead + (cost.request + cost.exchange) * running
    # What does not grow with the cache: computing, or the host where it is slower than that.
    even = max(cost.token * running, least_seconds(cost, running, running) - overhead)
    weights = weights_seconds(cost, running)
    # Reading the cache grows by `running` tokens a step; after step `turn` it takes longer than the rest.
    turn = -1.0
    if even > weights:
        turn = float(steps)
        if cost.kv_token > 0.0:
            turn = (even - weights - cost.kv_token * stored) / (cost.kv_token * running)
    early = min(int(turn) + 1, steps) if turn >= 0.0 else 0
    late = steps - early
    read = late * (weights + cost.kv_token * stored)
    read += cost.kv_token * running * (late * early + late * (late - 1) / 2.0)
    return steps * overhead + early * even + read


@compilable
def steps_until_dry(sim, rules, most):
    """How many steps the decoding requests can take before the pool cannot give a block; at most `most`."""
    state, seats, bs = sim.state[0], sim.seats, rules.block_size
    free = state.blank + state.cached
    cycles = free // state.num_running
    steps = cycles * bs
    if steps >= most:
        return most
    free -= cycles * state.num_running
    for offset in range(bs):
        free -= seats[(state.step + offset) % bs].decodes
        if free < 0:
            break
        steps += 1
    return min(steps, most)


@compilable
def steps_until_arrival(sim, rules, cost, most):
    """How many steps begin before the next request arrives; at most `most`."""
    state = sim.state[0]
    if state.next_arrival >= rules.num_requests:
        return most
    arrival = sim.requests[state.next_arrival].arrival
    if not rules.in_seconds:
        return min(most, int(arrival) - state.step)
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        begins = state.now + span_seconds(cost, state.num_running, state.stored + state.num_running, middle)
        if begins >= arrival:
            high = middle
        else:
            low = middle + 1
    return low
