"""The KV pool as admission sees it: which requests hold blocks, which wait, and when there will be room again.

It has no clock and no event loop: callers pass the time, and are called back through `Reservation.on_admitted`.

There are two rules of admission. Strict: each request is counted at its longest, so that vLLM never preempts. By
projection (the default): a request is admitted if the pool is projected to hold all requests until it ends, or if the
tokens it generates before it would be preempted outweigh computing them again.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator

from legroom.guard.pool.engine_usage import StepClock
from legroom.guard.pool.prefix_ledger import PrefixLedger
from legroom.guard.pool.projection import BlockNeed, Projection, Reservation, ReservationState, progress_of
from legroom.records import dataclass

LONGEST_RETRY_S = 45
"""Caps Retry-After; longer values left the server idle 12 % of the time (106 s, measured)."""
RELEASE_WINDOW_S = 10.0
"""The release rate is averaged over this: a few requests of ordinary length."""
RECOMPUTE_STEPS = 0.004
"""Steps to compute one prompt token: 0.003 for 8 billion parameters on an H200, 0.008 for a tiny model on two cores."""
SEQUENCE_GAIN = 0.6
"""Tokens a step that one more sequence adds, as each makes a step longer. On the H200 loads 0.3 costs 16 % goodput on
long answers, and 1.0 doubles preemptions (0025)."""
TAIL_FACTOR = 4
"""Waiting sequences times this below running ones: the load ends, preempting costs less: 9 % goodput (0025)."""
SMALL_DOUBT = 0.25
"""While small requests are served: share of the estimated steps by which a large one may run longer than expected."""
LEAD_S = 0.03
"""From admission to a request's first step: two network hops and the engine's queue. Without it -3 % goodput (0025)."""
PREFILL_GAP, MOST_GAP = 2.0, 0.8
"""While small requests are served: time between two large ones, in prefills, and at most in mean completions."""
RECHECK_INTERVAL_S = 0.05
"""How often waiting requests are checked; a projection (6 us a running request) stands so long or 0.5 ms each."""
ACTIVE_CLIENT_S = 60.0
"""Clients heard within this time share the pool."""

MOST_CLIENTS = 4096
"""Clients whose last tag is kept (0.5 MB); a forgotten one starts like a new one."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What may be held at once. None: no limit, or an unknown one."""

    blocks: int | None = None
    sequences: int | None = None
    """vLLM's max_num_seqs: more sequences would wait inside vLLM."""
    queue_requests: int = 0
    is_strict: bool = True
    """Count every request at its longest."""
    small_share: float = 0.0
    """Share of the pool kept for small requests while several clients send."""


class FairQueue:
    """Waiting requests: clients share the pool by weight, each client's requests in order of arrival.

    Start-time fair queuing: a request's tag is the end of its client's previous one, or the current virtual time; its
    cost over the client's weight later is its end. The smallest tag is next, so that a client with a hundred requests
    delays mostly its own.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Reservation]] = []
        self._waiting: OrderedDict[int, Reservation] = OrderedDict()
        self._ends: OrderedDict[str, float] = OrderedDict()
        self._virtual_time = 0.0
        self._numbers = itertools.count()
        self.per_client: dict[str, int] = {}
        """Waiting requests of each client that has some."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Reservation]:
        """In order of arrival."""
        return iter(self._waiting.values())

    def add(self, item: Reservation, weight: float = 1.0) -> None:
        """Queue a reservation by its client's fair share; a client of a higher `weight` is served more."""
        heapq.heappush(self._heap, (self.charge(item, weight), next(self._numbers), item))
        self._waiting[id(item)] = item
        self.per_client[item.client] = self.per_client.get(item.client, 0) + 1

    def charge(self, item: Reservation, weight: float = 1.0) -> float:
        """Charge a request, queued or not, to its client's fair share; returns its start in virtual time."""
        tag = max(self._virtual_time, self._ends.get(item.client, 0.0))
        self._ends[item.client] = tag + item.cost / weight
        self._ends.move_to_end(item.client)
        if len(self._ends) > MOST_CLIENTS:
            self._ends.popitem(last=False)
        return tag

    def next_in_turn(self) -> Reservation | None:
        """The waiting reservation next by fair share, which stays queued; None where nothing waits."""
        while self._heap and id(self._heap[0][2]) not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, item: Reservation) -> None:
        """Remove a request that was admitted or whose client left."""
        if self._heap and self._heap[0][2] is item:
            self._virtual_time = max(self._virtual_time, heapq.heappop(self._heap)[0])
        del self._waiting[id(item)]
        self.per_client[item.client] -= 1
        if not self.per_client[item.client]:
            del self.per_client[item.client]
        if not self._waiting:  # drops removed requests that the heap still refers to
            self._heap.clear()


class ReleaseForecast:
    """When enough blocks (or sequences) will have been released for one more request."""

    __slots__ = ("_at_s", "_mass", "_promised", "_promised_at_s", "_weight", "queued")

    def __init__(self, now_s: float) -> None:
        self.queued = 0
        """Needed by waiting requests."""
        self._promised = 0.0
        self._promised_at_s = self._at_s = now_s
        self._mass = self._weight = 0.0

    def add(self, amount: int, now_s: float) -> None:
        """Count blocks (or sequences) released at `now_s`."""
        self._decay_rate(now_s)
        self._mass += amount

    def per_s(self, now_s: float) -> float:
        """Blocks (or sequences) released per second, exponentially averaged; 0 without recent releases."""
        self._decay_rate(now_s)
        return self._mass / (self._weight * RELEASE_WINDOW_S) if self._weight > 0.01 else 0.0

    def _decay_rate(self, now_s: float) -> None:
        """Reduce the exponential average of releases by the time up to `now_s`."""
        kept = math.exp(-max(0.0, now_s - self._at_s) / RELEASE_WINDOW_S)
        self._at_s = max(now_s, self._at_s)
        self._mass *= kept
        self._weight = 1.0 - (1.0 - self._weight) * kept

    def wait_s(self, need: int, free: int, now_s: float, behind_queue: bool = True) -> float | None:
        """Seconds until a request refused now finds `need` blocks (or sequences) free; None without a rate. It counts
        behind those refused before it, so that a burst does not return at once, and if `behind_queue`, the queue."""
        rate = self.per_s(now_s)
        if rate <= 0:
            return None
        self._promised = max(0.0, self._promised - rate * (now_s - self._promised_at_s))
        self._promised_at_s = now_s
        missing = (self.queued if behind_queue else 0) + self._promised + need - max(0, free)
        self._promised += need
        return missing / rate


class Pool:
    """Admits requests in turns between clients, each client's requests in order of arrival. A small request fits in the
    share of the pool that `PoolLimits.small_share` keeps for such; all others are large."""

    def __init__(self, limits: PoolLimits, now_s: float = 0.0) -> None:
        self.limits = limits
        self.held_sequences = self.small_admitted = 0
        self.weights: dict[str, float] = {}
        """Shares of clients; 1 for those not named."""
        self.steps_per_s = 0.0
        """Tokens a second of one sequence, by finished answers; used where the engine does not count its steps."""
        self._pace_steps, self._pace_s = 0.0, 0.0
        self._large_after_s = -math.inf
        self._projection = Projection(-math.inf, 0.0, 1.0)
        self._needed_blocks = 0
        self._prefixes = PrefixLedger()
        self._step_clock = StepClock()
        self._small_blocks = 0
        self._running: dict[int, Reservation] = {}
        self._queue = FairQueue()
        self._clients: dict[str, float] = {}
        self._now_s = now_s
        self._small_until_s = -math.inf
        self._blocks = ReleaseForecast(now_s)
        self._sequences = ReleaseForecast(now_s)

    @property
    def held_blocks(self) -> int:
        """Blocks that running requests may grow to; a prefix that several share is counted once."""
        return self._needed_blocks - math.floor(self._prefixes.saved_blocks + 1e-6)

    @property
    def running(self) -> int:
        """Requests admitted and not released."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def waiting_clients(self) -> int:
        """Clients with requests in the queue."""
        return len(self._queue.per_client)

    @property
    def queued_blocks(self) -> int:
        """Blocks that the requests in the queue may grow to."""
        return self._blocks.queued

    def acquire(self, need: BlockNeed, now_s: float, client: str = "") -> Reservation:
        """Admit, queue or refuse a request; the reservation's state says which."""
        reservation = Reservation(need, now_s, client)
        limits, clients = self.limits, self._clients
        self._now_s = now_s
        clients.pop(client, None)
        clients[client] = now_s  # the last one to send; the first are forgotten
        while now_s - clients[oldest := next(iter(clients))] > ACTIVE_CLIENT_S or len(clients) > MOST_CLIENTS:
            del clients[oldest]
        if need.blocks <= self._small_share_blocks():
            self._small_until_s = now_s + ACTIVE_CLIENT_S
        if limits.blocks is not None and need.blocks > limits.blocks:
            reservation.state = ReservationState.TOO_LARGE
        elif (not self._queue and self._fits(need, now_s)) or self._take_small_share(reservation):
            self._queue.charge(reservation, self._weight(client))
            self._admit(reservation, now_s)
        elif len(self._queue) >= limits.queue_requests:
            reservation.state = ReservationState.QUEUE_FULL
        else:
            self._queue.add(reservation, self._weight(client))
            self._blocks.queued += need.blocks
            self._sequences.queued += need.sequences
        return reservation

    def release(self, reservation: Reservation, now_s: float) -> None:
        """Free what the request held, or its place in the queue, and admit what fits now; a second call is ignored."""
        need, state = reservation.need, reservation.state
        reservation.state = ReservationState.RELEASED
        if state is ReservationState.ADMITTED:
            del self._running[id(reservation)]
            self._needed_blocks -= need.blocks
            self._prefixes.remove(reservation)
            self.held_sequences -= need.sequences
            self._small_blocks -= need.blocks if reservation.is_small else 0
            self._blocks.add(need.blocks, now_s)
            self._sequences.add(need.sequences, now_s)
            if reservation.projected_blocks is not None:
                self._projection.add(reservation.projected_blocks, -1)
        elif state is ReservationState.WAITING:
            self._dequeue(reservation)
        else:
            return
        self.admit_waiting(now_s)

    def resize(self, limits: PoolLimits, now_s: float = 0.0) -> None:
        """Set other limits and admit waiting requests that now fit; running requests stay admitted."""
        self.limits = limits
        self.admit_waiting(now_s)

    def learn_pace(self, steps: int, seconds: float) -> None:
        """Update `steps_per_s` from an answer of `steps` tokens per sequence that took `seconds`."""
        if steps > 0 and seconds > 0:
            # Averaged apart, so that long answers count more: a short one mostly waited for its first token.
            share = 0.2 if self.steps_per_s else 1.0
            self._pace_steps += (steps - self._pace_steps) * share
            self._pace_s += (seconds - self._pace_s) * share
            self.steps_per_s = self._pace_steps / self._pace_s

    def learn_steps(self, steps: float, now_s: float) -> None:
        """Record the engine's step counter as scraped at `now_s`."""
        self._step_clock.add(steps, now_s)

    def retry_after_s(self, need: BlockNeed, now_s: float, has_waited: bool = False) -> int:
        """Whole seconds until a refused request likely fits, behind the queue unless it `has_waited`; 2 if unknown."""
        limits, waits_s = self.limits, []
        if limits.blocks is not None:
            free = limits.blocks - self.held_blocks
            waits_s.append(self._blocks.wait_s(need.blocks, free, now_s, not has_waited))
        if limits.sequences is not None:
            free = limits.sequences - self.held_sequences
            waits_s.append(self._sequences.wait_s(need.sequences, free, now_s, not has_waited))
        known = [wait_s for wait_s in waits_s if wait_s is not None]
        if not known:
            return 2
        # A longer forecast is spread over the second half of the longest one. Rounded down: a client that is early
        # waits in the queue, one that is late leaves the server idle.
        wait_s, half_s = min(max(known), 1e6), LONGEST_RETRY_S / 2
        return max(1, math.floor(wait_s if wait_s <= LONGEST_RETRY_S else half_s + wait_s % half_s))

    def admit_waiting(self, now_s: float) -> None:
        """Admit queued requests that fit, in turn, and small ones out of turn; called regularly, as others progress."""
        self._now_s = now_s
        while (first := self._queue.next_in_turn()) is not None and self._fits(first.need, now_s):
            self._dequeue(first)
            self._admit(first, now_s)
        if self._queue and self._reserved_for_small():
            for reservation in list(self._queue):
                if self._take_small_share(reservation):
                    self._dequeue(reservation)
                    self._admit(reservation, now_s)

    def _fits(self, need: BlockNeed, now_s: float) -> bool:
        """Whether the request may run now: the pool is empty, or sequences and blocks (held or projected) suffice."""
        limits = self.limits
        if not self._running:  # a request larger than a pool that shrank still runs alone
            return True
        if limits.sequences is not None and self.held_sequences + need.sequences > limits.sequences:
            return False
        if limits.blocks is None:
            return True
        reserved = self._reserved_for_small()
        if reserved and now_s < self._large_after_s:
            return False
        blocks = limits.blocks - (reserved - self._small_blocks)
        shared = self._prefixes.units_of(need.chains) * need.blocks_per_unit
        if self.held_blocks + need.blocks - shared <= blocks + 1e-6:
            return True
        if limits.is_strict or need.growth is None:
            return False
        return self._fits_by_projection(need.without(shared), blocks - self._prefixes.shared_blocks, now_s)

    def _fits_by_projection(self, need: BlockNeed, blocks: float, now_s: float) -> bool:
        """Whether `blocks` hold the request and all running ones until it ends, or the tokens that it generates before
        its preemption outweigh computing it again."""
        growth = need.growth
        assert growth is not None
        candidate = progress_of(growth, 0)
        projection = self._projection_at(now_s, 2 * growth.steps)
        if projection.steps_to_overflow(candidate, blocks, growth.steps) == math.inf:
            return True
        if self._reserved_for_small():  # vLLM preempts the newest request, which is the small one
            return False
        steps = projection.steps_to_overflow(candidate, blocks, candidate.steps_left[-1])
        slowed_down = self.held_sequences + need.sequences
        if self._sequences.queued:
            slowed_down = min(slowed_down, TAIL_FACTOR * self._sequences.queued)
        recompute_steps = RECOMPUTE_STEPS * (need.prompt_tokens + need.sequences * steps)
        return 0 < recompute_steps * slowed_down / (need.sequences * SEQUENCE_GAIN) <= steps

    def _projection_is_current(self, now_s: float) -> bool:
        """Whether the last projection of block use is recent enough to be used again."""
        return 0 <= now_s - self._projection.made_s < max(RECHECK_INTERVAL_S, 0.0005 * len(self._running))

    def _projection_at(self, now_s: float, steps: float) -> Projection:
        """The running requests' block use from `now_s` on, over at least `steps` engine steps; cached."""
        if self._projection_is_current(now_s) and steps <= self._projection.steps:
            return self._projection
        pace, running = self._step_clock.rate or self.steps_per_s, self._running.values()
        doubt = SMALL_DOUBT if self._reserved_for_small() else 0.0
        progress = [each.progress(self._estimated_steps(each, now_s), doubt) for each in running]
        projection = Projection(now_s, pace * LEAD_S, steps, progress)
        parts = [each.expected_blocks_at(projection.moments_from_now) for each in progress]
        for reservation, part in zip(running, parts, strict=True):
            reservation.projected_blocks = part
        if parts:
            projection.totals = [sum(column) for column in zip(*parts, strict=True)]
        self._projection = projection
        return projection

    def _estimated_steps(self, reservation: Reservation, now_s: float) -> float:
        """Engine steps since the request was admitted, by the engine's counter or the mean pace of earlier answers."""
        steps = self._step_clock.steps_since(reservation.admitted_s + LEAD_S, now_s)
        return self.steps_per_s * (now_s - reservation.admitted_s) if steps is None else steps

    def _reserved_for_small(self) -> int:
        """Blocks kept for small requests; 0 unless several clients are active and a small request came lately."""
        return self._small_share_blocks() if len(self._clients) > 1 and self._now_s <= self._small_until_s else 0

    def _small_share_blocks(self) -> int:
        """The policy's share for small requests, in blocks; 0 where there is none or the pool's size is unknown."""
        blocks, share = self.limits.blocks, self.limits.small_share
        return max(1, int(blocks * share)) if blocks and share else 0

    def _prefill_gap_s(self, need: BlockNeed) -> float:
        """Seconds until the next large request after this one, whose prefill slows small ones; 0 if pace is unknown."""
        pace = self._step_clock.rate or self.steps_per_s
        if need.growth is None or not pace:
            return 0.0
        between_completions = need.growth.mean_steps / max(1, len(self._running))
        return min(PREFILL_GAP * RECOMPUTE_STEPS * need.prompt_tokens, MOST_GAP * between_completions) / pace

    def _take_small_share(self, reservation: Reservation) -> bool:
        """Reserve blocks from the share kept for small requests; False where it, or max_num_seqs, has no room."""
        need, limit = reservation.need, self.limits.sequences
        if need.blocks + self._small_blocks > self._reserved_for_small():
            return False
        if limit is not None and self.held_sequences + need.sequences > limit:
            return False
        reservation.is_small = True
        self._small_blocks += need.blocks
        self.small_admitted += 1
        return True

    def _admit(self, reservation: Reservation, now_s: float) -> None:
        """Count the reservation as running from `now_s` on, and call its `on_admitted`."""
        reservation.state = ReservationState.ADMITTED
        reservation.admitted_s = now_s
        if not reservation.is_small and self._reserved_for_small():
            self._large_after_s = now_s + self._prefill_gap_s(reservation.need)
        self._running[id(reservation)] = reservation
        self._needed_blocks += reservation.need.blocks
        self._prefixes.add(reservation)
        self.held_sequences += reservation.need.sequences
        if self._projection_is_current(now_s):
            reservation.projected_blocks = reservation.progress(0.0).expected_blocks_at(self._projection.moments)
            self._projection.add(reservation.projected_blocks)
        if reservation.on_admitted is not None:
            reservation.on_admitted()

    def _dequeue(self, reservation: Reservation) -> None:
        """Take the reservation out of the queue and its blocks out of the queued total."""
        self._queue.remove(reservation)
        self._blocks.queued -= reservation.need.blocks
        self._sequences.queued -= reservation.need.sequences

    def _weight(self, client: str) -> float:
        """The client's weight in the fair queue; 1.0 unless the policy names it."""
        return self.weights.get(client, 1.0)
