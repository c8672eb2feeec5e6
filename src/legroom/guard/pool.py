"""The KV pool as admission sees it: who holds what, who waits, and when there will be room again.

No clock, no event loop: callers pass the time in and are called back through `Ticket.on_admitted`. Blocks are counted
at their worst, prompt and every token a request may still generate, so that the sum never outgrows the pool and vLLM
never has to preempt.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from legroom.records import dataclass

RATE_WINDOW_S = 10.0
"""Over how long the rate of releases is averaged: a few requests of ordinary length."""
UNKNOWN_RETRY_S = 2
"""What to answer before anything was ever released: soon, as nothing is known."""
LONGEST_RETRY_S = 120


class TicketState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    FULL = "full"
    """The queue holds as many as it may."""
    NEVER = "never"
    """It needs more than the whole pool."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What may be held at once. None is no limit: the size is not known, or nobody set one."""

    blocks: int | None = None
    seats: int | None = None
    """Sequences that vLLM runs at once (max_num_seqs): more would only wait inside it."""
    queue_requests: int = 0


class Need(NamedTuple):
    """What one request takes at its fullest."""

    blocks: int
    seats: int = 1


class Ticket:
    __slots__ = ("asked_s", "need", "on_admitted", "state")

    def __init__(self, need: Need, asked_s: float) -> None:
        self.need = need
        self.asked_s = asked_s
        self.state = TicketState.WAITING
        self.on_admitted: Callable[[], None] | None = None


class Pool:
    """Admits in the order of arrival, and only what fits beside all that was admitted before."""

    def __init__(self, limits: PoolLimits, now_s: float = 0.0) -> None:
        self.limits = limits
        self.held_blocks = 0
        self.held_seats = 0
        self.running = 0
        self._queue: OrderedDict[int, Ticket] = OrderedDict()
        self._blocks = _Supply(now_s)
        self._seats = _Supply(now_s)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def queued_blocks(self) -> int:
        """What they need together."""
        return self._blocks.queued

    def acquire(self, need: Need, now_s: float) -> Ticket:
        """Admit, queue or refuse; the ticket's state says which."""
        ticket = Ticket(need, now_s)
        limit = self.limits
        if limit.blocks is not None and need.blocks > limit.blocks:
            ticket.state = TicketState.NEVER
        elif not self._queue and self._fits(need):
            self._admit(ticket)
        elif len(self._queue) >= limit.queue_requests:
            ticket.state = TicketState.FULL
        else:
            self._queue[id(ticket)] = ticket
            self._blocks.queued += need.blocks
            self._seats.queued += need.seats
        return ticket

    def release(self, ticket: Ticket, now_s: float) -> None:
        """Give back what the request held, or its place in the queue; a second call does nothing."""
        state, ticket.state = ticket.state, TicketState.GONE
        if state is TicketState.ADMITTED:
            self.held_blocks -= ticket.need.blocks
            self.held_seats -= ticket.need.seats
            self.running -= 1
            self._blocks.rate.add(ticket.need.blocks, now_s)
            self._seats.rate.add(ticket.need.seats, now_s)
        elif state is TicketState.WAITING:
            del self._queue[id(ticket)]
            self._dequeued(ticket.need)
        else:
            return
        self._admit_from_queue()

    def resize(self, limits: PoolLimits) -> None:
        """Other limits from now on. Nobody who is in is put out; a smaller pool fills again as they leave."""
        self.limits = limits
        self._admit_from_queue()

    def retry_after_s(self, need: Need, now_s: float) -> int:
        """When there will likely be room for this request: whole seconds, at least one.

        What was refused lately is expected back too, so a burst is told to return spread out, not all at once.
        """
        limit, waits_s = self.limits, []
        if limit.blocks is not None:
            waits_s.append(self._blocks.wait_s(need.blocks, limit.blocks - self.held_blocks, now_s))
        if limit.seats is not None:
            waits_s.append(self._seats.wait_s(need.seats, limit.seats - self.held_seats, now_s))
        known = [wait_s for wait_s in waits_s if wait_s is not None]
        # Written so that an overflow or a tiny rate ends at the longest wait, never in an error.
        return max(1, math.ceil(min(max(known), LONGEST_RETRY_S))) if known else UNKNOWN_RETRY_S

    def _fits(self, need: Need) -> bool:
        limit = self.limits
        # After a pool shrank, or where one request asks for every seat, it must still get its turn: alone.
        if not self.running:
            return True
        if limit.blocks is not None and self.held_blocks + need.blocks > limit.blocks:
            return False
        return limit.seats is None or self.held_seats + need.seats <= limit.seats

    def _admit(self, ticket: Ticket) -> None:
        ticket.state = TicketState.ADMITTED
        self.held_blocks += ticket.need.blocks
        self.held_seats += ticket.need.seats
        self.running += 1
        if ticket.on_admitted is not None:
            ticket.on_admitted()

    def _admit_from_queue(self) -> None:
        """Strictly in order: a large request at the head is not overtaken for ever by small ones."""
        while self._queue:
            key, ticket = next(iter(self._queue.items()))
            if not self._fits(ticket.need):
                return
            del self._queue[key]
            self._dequeued(ticket.need)
            self._admit(ticket)

    def _dequeued(self, need: Need) -> None:
        self._blocks.queued -= need.blocks
        self._seats.queued -= need.seats


class _Supply:
    """Blocks or seats on their way back: how fast they come, and who is to have them."""

    __slots__ = ("_promised", "_promised_at_s", "queued", "rate")

    def __init__(self, now_s: float) -> None:
        self.rate = ReleaseRate(now_s)
        self.queued = 0
        self._promised = 0.0
        self._promised_at_s = now_s

    def wait_s(self, need: int, free: int, now_s: float) -> float | None:
        """When so many will be free, behind all that wait or were told to come back; None where nothing is known."""
        rate = self.rate.per_s(now_s)
        if rate <= 0:
            return None
        self._promised = max(0.0, self._promised - rate * (now_s - self._promised_at_s))
        self._promised_at_s = now_s
        missing = self.queued + self._promised + need - max(0, free)
        self._promised += need
        return missing / rate


class ReleaseRate:
    """What was given back a second, an exponential average without the bias of a short history."""

    __slots__ = ("_at_s", "_mass", "_weight")

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._mass = 0.0
        self._weight = 0.0

    def add(self, amount: int, now_s: float) -> None:
        self._decay(now_s)
        self._mass += amount

    def per_s(self, now_s: float) -> float:
        """The rate as of now; 0 where nothing was released lately."""
        self._decay(now_s)
        return self._mass / (self._weight * RATE_WINDOW_S) if self._weight > 0.01 else 0.0

    def _decay(self, now_s: float) -> None:
        kept = math.exp(-max(0.0, now_s - self._at_s) / RATE_WINDOW_S)
        self._at_s = max(now_s, self._at_s)
        self._mass *= kept
        self._weight = 1.0 - (1.0 - self._weight) * kept
