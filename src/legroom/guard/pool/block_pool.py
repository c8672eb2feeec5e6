"""The KV pool as admission sees it: who holds what, who waits, and when there will be room again.

No clock, no event loop: callers pass the time in and are called back through `Ticket.on_admitted`.

Two rules of admission. Strict: blocks are counted at their worst, prompt and every token a request may still generate,
so that the sum never outgrows the pool and vLLM never has to preempt. With a look ahead (`Need.growth` and
`PoolLimits.look_ahead`): what all hold should fit for the newcomer's life, by how far each has come; who would be
preempted begins all the same where that finishes more.
"""

from __future__ import annotations

import math

from legroom.guard.pool.early_start import Crowd, pays_to_begin
from legroom.guard.pool.engine_usage import EngineUsage, UsedShare
from legroom.guard.pool.fair_queue import MOST_CLIENTS, FairQueue
from legroom.guard.pool.prefill_cost import PrefillCost
from legroom.guard.pool.projection import Outlook, hold_of
from legroom.guard.pool.release_rate import Supply
from legroom.guard.pool.reservation import Need, Ticket, TicketState
from legroom.guard.pool.step_clock import StepClock
from legroom.guard.request.prefixes import PrefixLedger
from legroom.records import dataclass

UNKNOWN_RETRY_S = 2
"""What to answer before anything was ever released: soon, as nothing is known."""
LONGEST_RETRY_S = 45
"""A forecast further ahead follows from a rate of ten seconds: who was told to come in a minute and a half because the
server was slow just then leaves it idle (12 % of 106 s, measured). They come sooner, and are told anew."""
LONGEST_FORECAST_S = 1e6
USUAL_RECOMPUTE = 0.004
"""Steps for a token of a prompt until the engine has shown it: 0.003 for 8 billion parameters on an H200, 0.008 for a
tiny model on two cores."""
DEAR_FROM = 0.05
"""Steps for a token of a prompt from which on an answer is expected to be as long as most, not as the average."""


def _within_forecast(wait_s: float) -> float:
    """Spread over the second half of the longest wait, as those who came together must not return together."""
    half_s = LONGEST_RETRY_S / 2
    return wait_s if wait_s <= LONGEST_RETRY_S else half_s + wait_s % half_s


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What may be held at once. None is no limit: the size is not known, or nobody set one."""

    blocks: int | None = None
    seats: int | None = None
    """Sequences that vLLM runs at once (max_num_seqs): more would only wait inside it."""
    queue_requests: int = 0
    look_ahead: float | None = None
    """The share of its own life for which a newcomer finds room, unless it pays to begin before; None: strict."""
    recompute_steps: float = USUAL_RECOMPUTE
    """Steps that one token of a prompt takes to compute, until the engine has shown it: what a preemption costs."""
    lane_share: float = 0.0
    """Of the pool, kept from large requests for small ones while more than one client sends."""


LANE_DOUBT = 0.25
"""While small work is about: of the steps that a request has made by the clock alone, how many it may not have made. It
then ends later than expected, and the pool overflows."""
LEAD_S = 0.03
"""From admission to a request's first step: two hops and the engine's own queue. Who ends before makes room for it."""
PREFILL_GAP, MOST_GAP = 2.0, 0.8
"""While small work is about: from one large request to the next, times its prefill, and at most of the time that such
requests end apart."""
OUTLOOK_S, OUTLOOK_S_A_REQUEST = 0.05, 0.0005
"""How long the outlook stands until somebody ends, and for each that runs at least; those who come and go are followed
at once. Making one takes some 6 microseconds for each: a hundredth of the time."""
SOONEST_LOOK_S = 0.005
MOST_AHEAD = 16
"""Times the steps that are asked about, of an outlook that is asked."""
FEWEST_USED_SHARE = 0.25
"""Of the pool, what must be in use before it is compared with what was expected."""
OTHER_CLIENT_S = 60.0
"""Clients heard within this share the pool; the lane is kept open while there are several."""
PACE_SHARE = 0.2
"""Of the newest answer, in the average pace of all."""


class Pool:
    """Admits by turns between clients, each one's requests in order, and only what fits beside what was admitted."""

    def __init__(self, limits: PoolLimits, now_s: float = 0.0) -> None:
        self.limits = limits
        self.held_seats = 0
        self.lane_admitted = 0
        self.weights: dict[str, float] = {}
        """Of clients that have another share than 1."""
        self.steps_per_s = 0.0
        """Tokens a second that a running sequence gets, by the answers so far."""
        self._pace_steps, self._pace_s = 0.0, 0.0
        self._used = UsedShare()
        self._large_from_s = -math.inf
        self._outlook = Outlook(-math.inf, 0.0, 1.0)
        self._needed_blocks = 0
        self._prefixes = PrefixLedger()
        self._prefill_cost = PrefillCost()
        self._step_clock = StepClock()
        self._lane_blocks = 0
        self._running: dict[int, Ticket] = {}
        self._queue: FairQueue[Ticket] = FairQueue()
        self._heard: dict[str, float] = {}
        self._now_s = now_s
        self._small_until_s = -math.inf
        self._blocks = Supply(now_s)
        self._seats = Supply(now_s)

    @property
    def held_blocks(self) -> int:
        """What all that run may grow to; a beginning that several prompts have is held once."""
        return self._needed_blocks - math.floor(self._prefixes.saved_blocks + 1e-6)

    @property
    def running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def waiting_clients(self) -> int:
        """Clients that these are of."""
        return self._queue.clients

    @property
    def queued_blocks(self) -> int:
        """What they need together."""
        return self._blocks.queued

    def acquire(self, need: Need, now_s: float, client: str = "") -> Ticket:
        """Admit, queue or refuse; the ticket's state says which."""
        ticket = Ticket(need, now_s, client)
        limit = self.limits
        self._hear(client, now_s)
        if need.blocks <= self._lane_capacity():
            self._small_until_s = now_s + OTHER_CLIENT_S
        if limit.blocks is not None and need.blocks > limit.blocks:
            ticket.state = TicketState.NEVER
        elif (not self._queue and self._fits(need, now_s)) or self._enter_lane(ticket):
            self._queue.passed(ticket, self._weight(client))
            self._admit(ticket, now_s)
        elif len(self._queue) >= limit.queue_requests:
            ticket.state = TicketState.FULL
        else:
            self._queue.add(ticket, self._weight(client))
            self._blocks.queued += need.blocks
            self._seats.queued += need.seats
        return ticket

    def release(self, ticket: Ticket, now_s: float) -> None:
        """Give back what the request held, or its place in the queue; a second call does nothing."""
        state, ticket.state = ticket.state, TicketState.GONE
        if state is TicketState.ADMITTED:
            del self._running[id(ticket)]
            self._needed_blocks -= ticket.need.blocks
            self._prefixes.remove(ticket)
            self.held_seats -= ticket.need.seats
            self._lane_blocks -= ticket.need.blocks if ticket.in_lane else 0
            self._blocks.rate.add(ticket.need.blocks, now_s)
            self._seats.rate.add(ticket.need.seats, now_s)
            if ticket.outlook is not None:
                self._outlook.remove(ticket.outlook)
        elif state is TicketState.WAITING:
            self._queue.remove(ticket)
            self._dequeued(ticket.need)
        else:
            return
        self.admit_waiting(now_s)

    def resize(self, limits: PoolLimits, now_s: float = 0.0) -> None:
        """Other limits from now on. Nobody who is in is put out; a smaller pool fills again as they leave."""
        self.limits = limits
        self.admit_waiting(now_s)

    def learn_pace(self, steps: int, seconds: float) -> None:
        """An answer of so many tokens a sequence took so long."""
        if steps > 0 and seconds > 0:
            # Long answers tell more of the pace: a short one has waited for its first token most of the time.
            share = PACE_SHARE if self.steps_per_s else 1.0
            self._pace_steps += (steps - self._pace_steps) * share
            self._pace_s += (seconds - self._pace_s) * share
            self.steps_per_s = self._pace_steps / self._pace_s

    def learn_usage(self, use: EngineUsage, now_s: float) -> None:
        """The engine said what part of what was expected is really in use, and how far it has come."""
        blocks = self.limits.blocks
        self._prefill_cost.learn(use, now_s)
        if use.steps:
            self._step_clock.learn(use.steps / use.engines, now_s)
        if not blocks or self.limits.look_ahead is None or use.kv_share < FEWEST_USED_SHARE:
            return
        if use.waiting:  # it holds nothing, and which of those let in it is nobody says
            return
        expected = self._outlook_at(now_s).totals[0] + self._prefixes.shared_blocks
        if expected > 0:
            self._used.learn(use.kv_share * blocks / expected, now_s)

    @property
    def recompute_steps(self) -> float:
        """Steps that one token of a prompt takes to compute, as the rule in force takes it."""
        learnt = self._prefill_cost.steps_a_token
        return self.limits.recompute_steps if learnt is None else learnt

    @property
    def recompute_is_dear(self) -> bool:
        """Whether a preemption costs more than the steps that it made room for."""
        return self.recompute_steps >= DEAR_FROM

    @property
    def use_ratio(self) -> float:
        """Blocks in use over those expected."""
        return self._used.ratio(self._now_s)

    def retry_after_s(self, need: Need, now_s: float, gave_up: bool = False) -> int:
        """When there will likely be room for this request: whole seconds, at least one.

        What was refused lately is expected back too, so a burst is told to return spread out, not all at once.
        """
        limit, waits_s = self.limits, []
        if limit.blocks is not None:
            free = limit.blocks - self.held_blocks
            waits_s.append(self._blocks.wait_s(need.blocks, free, now_s, not gave_up))
        if limit.seats is not None:
            waits_s.append(self._seats.wait_s(need.seats, limit.seats - self.held_seats, now_s, not gave_up))
        known = [wait_s for wait_s in waits_s if wait_s is not None]
        # Written so that an overflow or a tiny rate ends at the longest wait, never in an error. Rounded down: who
        # comes early finds a place in the queue, who comes late leaves the server idle.
        return max(1, math.floor(_within_forecast(min(max(known), LONGEST_FORECAST_S)))) if known else UNKNOWN_RETRY_S

    def admit_waiting(self, now_s: float) -> None:
        """The next in turn as long as it fits; it is not overtaken, but for small work in its own lane. With a look
        ahead time alone makes room, as those that run come nearer to their end: call it now and then.
        """
        self._now_s = now_s
        while (ticket := self._queue.first()) is not None and self._fits(ticket.need, now_s):
            self._admit_queued(ticket, now_s)
        if self._queue and self._lane_size():
            for ticket in list(self._queue):
                if self._enter_lane(ticket):
                    self._admit_queued(ticket, now_s)

    def _fits(self, need: Need, now_s: float) -> bool:
        limit = self.limits
        # After a pool shrank, or where one request asks for every seat, it must still get its turn: alone.
        if not self._running:
            return True
        if limit.seats is not None and self.held_seats + need.seats > limit.seats:
            return False
        if limit.blocks is None:
            return True
        lane = self._lane_size()
        if lane and now_s < self._large_from_s:
            return False
        blocks = limit.blocks - (lane - self._lane_blocks)
        shared = self._prefixes.units_of(need.chains) * need.blocks_a_unit
        if self.held_blocks + need.blocks - shared <= blocks + 1e-6:
            return True
        need = need.without(shared)
        if limit.look_ahead is None or need.growth is None:
            return False
        room = blocks / self.use_ratio - self._prefixes.shared_blocks
        growth = need.growth
        newcomer = hold_of(growth, 0, counted=True)
        steps = growth.steps if lane else limit.look_ahead * growth.steps
        outlook = self._outlook_at(now_s, 2 * growth.steps)
        if outlook.has_room(newcomer, room, steps):
            return True
        # While small work is about nobody is to be preempted: the newest is, which is the small one, and whoever was
        # preempted before stands in front of it in the engine's queue.
        crowd = Crowd(self.held_seats, self._seats.queued)
        return not lane and pays_to_begin(need, newcomer, outlook, room, crowd, self.recompute_steps)

    def look_in_s(self, now_s: float, longest_s: float) -> float:
        """When to look for room again: when somebody is about to end, by the engine's steps."""
        until_s = self._outlook.made_s + self._outlook_stands_s() - now_s
        return min(longest_s, max(SOONEST_LOOK_S, until_s))

    def _outlook_stands_s(self) -> float:
        least_s = OUTLOOK_S_A_REQUEST * len(self._running)
        pace = self._step_clock.rate
        end_s = self._outlook.first_end / pace if pace else math.inf
        return max(least_s, min(OUTLOOK_S, end_s))

    def _is_fresh(self, now_s: float) -> bool:
        return 0 <= now_s - self._outlook.made_s < self._outlook_stands_s()

    def _outlook_at(self, now_s: float, steps: float = 0.0) -> Outlook:
        """For at least so many steps; for many more it would look at too few of the first."""
        seen = self._outlook.steps
        if self._is_fresh(now_s) and (not steps or steps <= seen <= MOST_AHEAD * steps):
            return self._outlook
        pace, tickets = self._step_clock.rate or self.steps_per_s, self._running.values()
        doubt = LANE_DOUBT if self._lane_size() else 0.0
        holds = [ticket.hold(self._steps_of(ticket, now_s), doubt) for ticket in tickets]
        outlook = Outlook(now_s, pace * LEAD_S, steps or seen, holds)
        for ticket, hold in zip(tickets, holds, strict=True):
            ticket.outlook = outlook.of(hold)
        outlook.start([ticket.outlook for ticket in tickets if ticket.outlook is not None])
        self._outlook = outlook
        return outlook

    def _steps_of(self, ticket: Ticket, now_s: float) -> float:
        """Steps that a request has likely made, by the engine's count or by the pace of earlier answers."""
        steps = self._step_clock.steps_since(ticket.admitted_s + LEAD_S, now_s)
        return self.steps_per_s * (now_s - ticket.admitted_s) if steps is None else steps

    def _lane_size(self) -> int:
        """Blocks kept for small work: only while there is somebody to keep them for."""
        return self._lane_capacity() if len(self._heard) > 1 and self._now_s <= self._small_until_s else 0

    def _lane_capacity(self) -> int:
        blocks, share = self.limits.blocks, self.limits.lane_share
        return max(1, int(blocks * share)) if blocks and share else 0

    def _prefill_gap_s(self, need: Need) -> float:
        """Until the next large request after this one while small work is about: prompts that are computed in one step
        hold up a small request that decodes beside them by all of them. No longer than requests like it end apart.
        """
        pace = self._step_clock.rate or self.steps_per_s
        if need.growth is None or not pace:
            return 0.0
        apart = need.growth.average_steps / max(1, len(self._running))
        return min(PREFILL_GAP * self.recompute_steps * need.prompt_tokens, MOST_GAP * apart) / pace

    def _enter_lane(self, ticket: Ticket) -> bool:
        need, size, seats = ticket.need, self._lane_size(), self.limits.seats
        if need.blocks + self._lane_blocks > size or (seats is not None and self.held_seats + need.seats > seats):
            return False
        ticket.in_lane = True
        self._lane_blocks += need.blocks
        self.lane_admitted += 1
        return True

    def _admit(self, ticket: Ticket, now_s: float) -> None:
        ticket.state = TicketState.ADMITTED
        ticket.admitted_s = now_s
        if not ticket.in_lane and self._lane_size():
            self._large_from_s = now_s + self._prefill_gap_s(ticket.need)
        self._running[id(ticket)] = ticket
        self._needed_blocks += ticket.need.blocks
        self._prefixes.add(ticket)
        self.held_seats += ticket.need.seats
        if self._is_fresh(now_s):  # else nobody has to look ahead: there is room for all
            ticket.outlook = self._outlook.of_newcomer(ticket.hold(0.0))
            self._outlook.add(ticket.outlook)
        if ticket.on_admitted is not None:
            ticket.on_admitted()

    def _admit_queued(self, ticket: Ticket, now_s: float) -> None:
        self._queue.remove(ticket)
        self._dequeued(ticket.need)
        self._admit(ticket, now_s)

    def _dequeued(self, need: Need) -> None:
        self._blocks.queued -= need.blocks
        self._seats.queued -= need.seats

    def _weight(self, client: str) -> float:
        return self.weights.get(client, 1.0)

    def _hear(self, client: str, now_s: float) -> None:
        """Note who sends; those silent for a while are forgotten, the longest silent first."""
        self._now_s = now_s
        heard = self._heard
        heard.pop(client, None)
        heard[client] = now_s
        while now_s - heard[longest_silent := next(iter(heard))] > OTHER_CLIENT_S or len(heard) > MOST_CLIENTS:
            del heard[longest_silent]
