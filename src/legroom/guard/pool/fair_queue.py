"""Who is next: clients share the pool by weight, and each one's requests are in order of arrival.

Start-time fair queuing: a request's tag is where its client's last one ended, or the time now in that measure, and its
cost over the client's weight is where it ends. The smallest tag is next. A client that sends a hundred requests only
pushes its own tags ahead, and a tag once given is overtaken by no more than what every other client was due before it:
nobody waits for ever.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

MOST_CLIENTS = 4096
"""Clients whose last tag is remembered: one forgotten starts afresh, as a new one does."""


class Queued(Protocol):
    """What waits."""

    client: str

    @property
    def cost(self) -> float:
        """What it takes of the server, in any one unit."""


Q = TypeVar("Q", bound=Queued)


class FairQueue(Generic[Q]):
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Q]] = []
        self._waiting: OrderedDict[int, Q] = OrderedDict()
        self._ends: OrderedDict[str, float] = OrderedDict()
        self._now = 0.0
        self._numbers = itertools.count()
        self._per_client: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Q]:
        """In order of arrival."""
        return iter(self._waiting.values())

    @property
    def clients(self) -> int:
        """Clients that wait."""
        return len(self._per_client)

    def add(self, item: Q, weight: float = 1.0) -> None:
        start = max(self._now, self._ends.get(item.client, 0.0))
        self._note_end(item.client, start + item.cost / weight)
        heapq.heappush(self._heap, (start, next(self._numbers), item))
        self._waiting[id(item)] = item
        self._per_client[item.client] = self._per_client.get(item.client, 0) + 1

    def passed(self, item: Q, weight: float = 1.0) -> None:
        """One that did not have to wait: it counts towards its client's share all the same."""
        self._note_end(item.client, max(self._now, self._ends.get(item.client, 0.0)) + item.cost / weight)

    def first(self) -> Q | None:
        while self._heap and id(self._heap[0][2]) not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, item: Q) -> None:
        """Take one out: it is admitted, or its client left."""
        if self._heap and self._heap[0][2] is item:
            self._now = max(self._now, heapq.heappop(self._heap)[0])
        del self._waiting[id(item)]
        count = self._per_client[item.client] - 1
        if count:
            self._per_client[item.client] = count
        else:
            del self._per_client[item.client]
        if not self._waiting:  # what is left in the heap is gone, and its objects must not be kept alive
            self._heap.clear()

    def _note_end(self, client: str, end: float) -> None:
        self._ends[client] = end
        self._ends.move_to_end(client)
        if len(self._ends) > MOST_CLIENTS:
            self._ends.popitem(last=False)
