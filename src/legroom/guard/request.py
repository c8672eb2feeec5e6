"""A request on a guarded path, from its body to the end of its answer."""

from __future__ import annotations

from legroom.guard.demand import Demand
from legroom.guard.pool import Ticket
from legroom.guard.weigh import Weight


class GuardedRequest:
    __slots__ = ("answered", "body", "changed", "demand", "events", "informative", "ticket", "usage", "weight")

    def __init__(self, body: bytes, demand: Demand, changed: bool = False) -> None:
        self.body = body
        self.demand = demand
        self.changed = changed
        """The body is not as the client sent it."""
        self.informative = demand.informative
        self.weight: Weight | None = None
        self.ticket: Ticket | None = None
        self.usage: tuple[int, int] | None = None
        """Prompt and output tokens, as its answer named them last."""
        self.answered = False
        """A good answer began."""
        self.events = 0
        """Pieces of its stream so far."""
