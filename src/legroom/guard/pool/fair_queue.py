"""The order of waiting requests: clients share the pool by weight, each client's requests in order of arrival.

Start-time fair queuing: a request's tag is the end of its client's previous one, or the current virtual time; its cost
over the client's weight later is its end. The smallest tag is next, so that a client with a hundred requests delays
mostly its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from legroom.guard.pool.projection import Reservation

MOST_CLIENTS = 4096
"""Clients whose last tag is kept (0.5 MB); a forgotten one starts like a new one."""


class FairQueue:
    """Waiting reservations; their `cost` is counted towards their client's share."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Reservation]] = []
        self._waiting: OrderedDict[int, Reservation] = OrderedDict()
        self._ends: OrderedDict[str, float] = OrderedDict()
        self._virtual_time = 0.0
        self._numbers = itertools.count()
        self._per_client: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Reservation]:
        """In order of arrival."""
        return iter(self._waiting.values())

    @property
    def clients(self) -> int:
        """Clients with waiting requests."""
        return len(self._per_client)

    def add(self, item: Reservation, weight: float = 1.0) -> None:
        tag = self.count(item, weight)
        heapq.heappush(self._heap, (tag, next(self._numbers), item))
        self._waiting[id(item)] = item
        self._per_client[item.client] = self._per_client.get(item.client, 0) + 1

    def count(self, item: Reservation, weight: float = 1.0) -> float:
        """Count a request towards its client's share, also one that need not wait; returns its tag."""
        tag = max(self._virtual_time, self._ends.get(item.client, 0.0))
        self._ends[item.client] = tag + item.cost / weight
        self._ends.move_to_end(item.client)
        if len(self._ends) > MOST_CLIENTS:
            self._ends.popitem(last=False)
        return tag

    def first(self) -> Reservation | None:
        while self._heap and id(self._heap[0][2]) not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, item: Reservation) -> None:
        """Remove a request that was admitted or whose client left."""
        if self._heap and self._heap[0][2] is item:
            self._virtual_time = max(self._virtual_time, heapq.heappop(self._heap)[0])
        del self._waiting[id(item)]
        self._per_client[item.client] -= 1
        if not self._per_client[item.client]:
            del self._per_client[item.client]
        if not self._waiting:  # drops removed requests that the heap still refers to
            self._heap.clear()
