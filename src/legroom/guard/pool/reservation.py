"""A request's claim on the pool: what it needs, and where it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from legroom.guard.pool.projection import Growth, Holding, hold_of
from legroom.guard.request.prefixes import PrefixChain


class TicketState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    FULL = "full"
    """The queue holds as many as it may."""
    NEVER = "never"
    """It needs more than the whole pool."""
    GONE = "gone"


class Need(NamedTuple):
    """What one request takes at its fullest."""

    blocks: int
    seats: int = 1
    growth: Growth | None = None
    """How it gets there; None: it holds all of it from the start."""
    prompt_tokens: int = 0
    """What being preempted costs it, beside the tokens it has made by then."""
    chains: tuple[PrefixChain, ...] = ()
    """How its prompts begin; empty where the server shares nothing."""
    blocks_a_unit: float = 1.0

    @property
    def average_blocks(self) -> float:
        """What it holds over its life."""
        return self.blocks if self.growth is None else (self.growth.start_blocks + self.growth.end_blocks) / 2

    def without(self, blocks: float) -> Need:
        """The same beside others that hold so many of its blocks, too: preempted, it does not lose these."""
        if not blocks or self.growth is None:
            return self
        kept = max(0.0, 1 - blocks / self.growth.start_blocks)
        return self._replace(growth=self.growth.without(blocks), prompt_tokens=round(self.prompt_tokens * kept))


class Ticket:
    __slots__ = (
        "_own_need",
        "_own_units",
        "admitted_s",
        "asked_s",
        "blocks_a_unit",
        "chains",
        "client",
        "in_lane",
        "need",
        "on_admitted",
        "outlook",
        "shared_units",
        "state",
        "steps_seen",
    )

    def __init__(self, need: Need, asked_s: float, client: str = "") -> None:
        self.need = need
        self.asked_s = asked_s
        self.client = client
        self.admitted_s = asked_s
        self.steps_seen = 0
        """Tokens of each sequence that passed by, where the answer is a stream."""
        self.outlook: list[float] | None = None
        """What it was taken to hold later on, while it runs."""
        self.chains = need.chains
        self.blocks_a_unit = need.blocks_a_unit
        self.shared_units = 0
        self._own_units, self._own_need = 0, need
        self.in_lane = False
        self.state = TicketState.WAITING
        self.on_admitted: Callable[[], None] | None = None

    @property
    def cost(self) -> float:
        """Its part of the pool, over the time it is held."""
        growth = self.need.growth
        return self.need.average_blocks * (max(1, growth.steps) if growth is not None else 1)

    @property
    def shared_blocks(self) -> float:
        """Of its blocks, those that other running requests hold, too."""
        return self.shared_units * self.blocks_a_unit

    @property
    def own_need(self) -> Need:
        """Without what others hold, too: asked again and again while who shares what seldom changes."""
        if self._own_units != self.shared_units:
            self._own_units, self._own_need = self.shared_units, self.need.without(self.shared_blocks)
        return self._own_need

    def hold(self, likely_steps: float, doubt: float = 0.0) -> Holding:
        """What it alone holds, by the tokens that passed or the steps that it has likely made. `doubt`: the share of
        the latter by which it may stay longer.
        """
        growth = self.own_need.growth
        if growth is None:
            own = max(0.0, self.need.blocks - self.shared_blocks)
            return Holding(Growth(own, own, 1, 1), 0.0, (math.inf,))
        if self.steps_seen:
            return hold_of(growth, self.steps_seen, counted=True)
        holding = hold_of(growth, likely_steps, counted=False)
        if not doubt:
            return holding
        longer = doubt * holding.done_steps
        return holding._replace(steps_left=tuple([steps + longer for steps in holding.steps_left]))
