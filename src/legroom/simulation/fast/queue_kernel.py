"""The waiting queue, the running list and the order of finishing, as lists over rows."""
# mypy: disable-error-code="no-any-return"

from typing import Any

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import ALL_BLOCKS, DECODING, REJECTED, Rules, Sim


@compilable
def enqueue(sim: Sim, rules: Rules, r: int, is_preempted: bool) -> None:
    """Queues request number `r`: behind the others, in front if it was preempted, or where its priority puts it."""
    state, requests = sim.state[0], sim.requests
    if not rules.by_priority:
        # A ring buffer.
        if is_preempted:
            state.queue_head = (state.queue_head - 1) % rules.num_requests
            requests[state.queue_head].queued = r
        else:
            requests[(state.queue_head + state.num_waiting) % rules.num_requests].queued = r
        state.num_waiting += 1
        return
    # A heap of priority ranks.
    place = state.num_waiting
    state.num_waiting += 1
    priority_rank = requests[r].priority_rank
    while place > 0 and requests[(place - 1) // 2].queued > priority_rank:
        requests[place].queued = requests[(place - 1) // 2].queued
        place = (place - 1) // 2
    requests[place].queued = priority_rank


@compilable
def peek_waiting(sim: Sim, rules: Rules) -> int:
    """The number of the waiting request that is admitted next; it stays in the queue."""
    state, requests = sim.state[0], sim.requests
    if rules.by_priority:
        return requests[requests[0].queued].by_priority_rank
    return requests[state.queue_head].queued


@compilable
def pop_waiting(sim: Sim, rules: Rules) -> None:
    """Removes the waiting request that is admitted next from the queue."""
    state, requests = sim.state[0], sim.requests
    state.num_waiting -= 1
    if not rules.by_priority:
        state.queue_head = (state.queue_head + 1) % rules.num_requests
        return
    size = state.num_waiting
    last = requests[size].queued
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and requests[child + 1].queued < requests[child].queued:
            child += 1
        if requests[child].queued >= last:
            break
        requests[place].queued = requests[child].queued
        place = child
    requests[place].queued = last


@compilable
def remove_running(sim: Sim, r: int) -> None:
    """Removes request number `r` from the running list, whose order is that of admission."""
    state, requests, running = sim.state[0], sim.requests, sim.running
    size, rank = state.num_running, requests[r].rank
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if requests[running[middle]].rank < rank:
            low = middle + 1
        else:
            high = middle
    running[low : size - 1] = running[low + 1 : size].copy()
    state.num_running = size - 1


@compilable
def last_step(sim: Sim, r: int) -> int:
    """The number of the step in which request number `r`, now decoding, samples its last token."""
    request = sim.requests[r]
    return request.total - 2 - request.step_offset


@compilable
def finish_index(sim: Sim, r: int) -> int:
    """Where request number `r` belongs in `finish_order`: later finishes first, equal ones in reverse running order."""
    requests, finish_order = sim.requests, sim.finish_order
    step, rank = requests[r].total - 2 - requests[r].step_offset, requests[r].rank
    low, high = 0, sim.state[0].num_decodes
    while low < high:
        middle = (low + high) // 2
        other = finish_order[middle]
        when = requests[other].total - 2 - requests[other].step_offset
        if when > step or (when == step and requests[other].rank > rank):
            low = middle + 1
        else:
            high = middle
    return low


@compilable
def start_decoding(sim: Sim, rules: Rules, r: int, base: int) -> None:
    """Lets request number `r` decode from the next step on; `base`: its computed tokens less the step's number."""
    state, request, finish_order = sim.state[0], sim.requests[r], sim.finish_order
    decodes = state.num_decodes
    request.step_offset = base
    request.state = DECODING
    place = finish_index(sim, r)
    finish_order[place + 1 : decodes + 1] = finish_order[place:decodes].copy()
    finish_order[place] = r
    state.num_decodes += 1
    phase = -base % rules.block_size
    sim.decodes_by_phase[phase] += 1
    if request.shared_blocks == ALL_BLOCKS:
        sim.shared_decodes_by_phase[phase] += 1
        state.shared_decodes += 1


@compilable
def stop_decoding(sim: Sim, rules: Rules, r: int) -> None:
    """Takes request number `r` off the lists of decoding requests."""
    state, request, finish_order = sim.state[0], sim.requests[r], sim.finish_order
    place, decodes = finish_index(sim, r), state.num_decodes
    finish_order[place : decodes - 1] = finish_order[place + 1 : decodes].copy()
    state.num_decodes -= 1
    phase = -request.step_offset % rules.block_size
    sim.decodes_by_phase[phase] -= 1
    if request.shared_blocks == ALL_BLOCKS:
        sim.shared_decodes_by_phase[phase] -= 1
        state.shared_decodes -= 1


@compilable
def remove_from(numbers: Any, size: int, r: int) -> None:
    """Removes request number `r`, in place, from the first `size` entries of the array `numbers`."""
    place = 0
    while numbers[place] != r:
        place += 1
    for i in range(place, size - 1):
        numbers[i] = numbers[i + 1]


@compilable
def sort_finishing(sim: Sim) -> None:
    """Sort the requests that finish in this step by their order in the running list."""
    state, requests = sim.state[0], sim.requests
    for i in range(1, state.num_finishing):
        r = sim.finishing[i]
        place = i
        while place and requests[sim.finishing[place - 1]].rank > requests[r].rank:
            sim.finishing[place] = sim.finishing[place - 1]
            place -= 1
        sim.finishing[place] = r


@compilable
def enqueue_arrivals(sim: Sim, rules: Rules) -> None:
    """Queue every request that has arrived by the current step."""
    state, requests = sim.state[0], sim.requests
    now = state.now if rules.in_seconds else float(state.step)
    while state.next_arrival < rules.num_requests and requests[state.next_arrival].arrival <= now:
        if requests[state.next_arrival].state != REJECTED:
            enqueue(sim, rules, state.next_arrival, False)
            if rules.by_priority:
                state.blocked = 0
        state.next_arrival += 1


@compilable
def ask_again(sim: Sim, rules: Rules) -> None:
    """After an answer, lets a user's next question arrive after a pause; if that is rejected, the one after it too."""
    state, requests = sim.state[0], sim.requests
    while state.num_asked < rules.num_requests:
        place = state.num_asked
        asks = state.now + requests[place].pause_s
        while place > state.next_arrival and requests[place - 1].arrival > asks:
            requests[place].arrival = requests[place - 1].arrival
            place -= 1
        requests[place].arrival = asks
        state.num_asked += 1
        if requests[state.num_asked - 1].state != REJECTED:
            return


@compilable
def skip_to_next_arrival(sim: Sim, rules: Rules) -> bool:
    """Moves the clock of an idle server to the next arrival; False where no request is left to arrive."""
    state, requests = sim.state[0], sim.requests
    while state.next_arrival < rules.num_requests and requests[state.next_arrival].state == REJECTED:
        state.next_arrival += 1
    if state.next_arrival >= rules.num_requests:
        return False
    arrival = requests[state.next_arrival].arrival
    if rules.in_seconds:
        state.now = max(state.now, arrival)
    else:
        state.step = max(state.step, int(arrival))
    return True
