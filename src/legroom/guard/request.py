"""One request on its way through the door."""

from __future__ import annotations

from legroom.guard.demand import Demand
from legroom.guard.pool import Ticket
from legroom.guard.weigh import Weight


class Visit:
    """What is known of a request while it is here."""

    __slots__ = ("answered", "body", "changed", "demand", "events", "teaches", "ticket", "usage", "weight")

    def __init__(self, body: bytes, demand: Demand, changed: bool = False) -> None:
        self.body = body
        self.demand = demand
        self.changed = changed
        """The body is not as the client sent it."""
        self.teaches = demand.teaches
        self.weight: Weight | None = None
        self.ticket: Ticket | None = None
        self.usage: tuple[int, int] | None = None
        """Prompt and output tokens, as its answer named them last."""
        self.answered = False
        """A good answer began."""
        self.events = 0
        """Pieces of its stream so far."""
