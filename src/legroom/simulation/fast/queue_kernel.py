"""Who arrives, who waits, who runs, who finishes when: lists over rows."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from legroom.simulation.fast.jit import compilable
from legroom.simulation.fast.rows import ALL_BLOCKS, DECODING, REJECTED


@compilable
def wait(sim, rules, r, comes_back):
    """Queue a request: at the back, at the front if it comes back, or by urgency."""
    state, requests = sim.state[0], sim.requests
    if not rules.by_priority:
        # A ring.
        if comes_back:
            state.queue_head = (state.queue_head - 1) % rules.num_requests
            requests[state.queue_head].queued = r
        else:
            requests[(state.queue_head + state.num_waiting) % rules.num_requests].queued = r
        state.num_waiting += 1
        return
    # A heap.
    place = state.num_waiting
    state.num_waiting += 1
    urgency = requests[r].urgency
    while place > 0 and requests[(place - 1) // 2].queued > urgency:
        requests[place].queued = requests[(place - 1) // 2].queued
        place = (place - 1) // 2
    requests[place].queued = urgency


@compilable
def first_waiting(sim, rules):
    """The request to be admitted next."""
    state, requests = sim.state[0], sim.requests
    if rules.by_priority:
        return requests[requests[0].queued].by_urgency
    return requests[state.queue_head].queued


@compilable
def leave_queue(sim, rules):
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
def leave_running(sim, r):
    """Take a request out of the running list, which is ordered by rank."""
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
def due_step(sim, r):
    """The step in which a decoding request samples its last token."""
    request = sim.requests[r]
    return request.total - 2 - request.base


@compilable
def due_place(sim, r, decodes):
    """Where `r` stands, or would stand, among those that finish: latest first, of equals the last in line first."""
    requests, due = sim.requests, sim.due
    step, rank = requests[r].total - 2 - requests[r].base, requests[r].rank
    low, high = 0, decodes
    while low < high:
        middle = (low + high) // 2
        other = due[middle]
        when = requests[other].total - 2 - requests[other].base
        if when > step or (when == step and requests[other].rank > rank):
            low = middle + 1
        else:
            high = middle
    return low


@compilable
def start_decoding(sim, rules, r, base, decodes):
    """From the next step on, one token a step, beside the `decodes` requests that do so already."""
    state, request, seats, due = sim.state[0], sim.requests[r], sim.seats, sim.due
    request.base = base
    request.state = DECODING
    place = due_place(sim, r, decodes)
    due[place + 1 : decodes + 1] = due[place:decodes].copy()
    due[place] = r
    phase = -base % rules.block_size
    seats[phase].decodes += 1
    if request.shared_blocks == ALL_BLOCKS:
        seats[phase].shared_decodes += 1
        state.shared_decodes += 1


@compilable
def stop_decoding(sim, rules, r, decodes):
    """Take `r` out of the `decodes` requests that decode."""
    state, request, seats, due = sim.state[0], sim.requests[r], sim.seats, sim.due
    place = due_place(sim, r, decodes)
    due[place : decodes - 1] = due[place + 1 : decodes].copy()
    phase = -request.base % rules.block_size
    seats[phase].decodes -= 1
    if request.shared_blocks == ALL_BLOCKS:
        seats[phase].shared_decodes -= 1
        state.shared_decodes -= 1


@compilable
def drop_prefill(sim, r):
    """Take `r` out of the requests that prefill."""
    state, seats = sim.state[0], sim.seats
    place = 0
    while seats[place].prefill != r:
        place += 1
    for i in range(place, state.num_prefills - 1):
        seats[i].prefill = seats[i + 1].prefill
    state.num_prefills -= 1


@compilable
def sort_finishing(sim):
    """Those that finish, in running order; there are few."""
    state, requests, seats = sim.state[0], sim.requests, sim.seats
    for i in range(1, state.num_finishing):
        r = seats[i].finishing
        place = i
        while place and requests[seats[place - 1].finishing].rank > requests[r].rank:
            seats[place].finishing = seats[place - 1].finishing
            place -= 1
        seats[place].finishing = r


@compilable
def arrive(sim, rules):
    """Queue everybody who has arrived by the current step."""
    state, requests = sim.state[0], sim.requests
    now = state.now if rules.in_seconds else float(state.step)
    while state.next_arrival < rules.num_requests and requests[state.next_arrival].arrival <= now:
        if requests[state.next_arrival].state != REJECTED:
            wait(sim, rules, state.next_arrival, False)
            if rules.by_priority:
                state.blocked = 0
        state.next_arrival += 1


@compilable
def skip_idle(sim, rules):
    """Nothing runs and nobody waits: go to the next arrival. False if there is none."""
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
