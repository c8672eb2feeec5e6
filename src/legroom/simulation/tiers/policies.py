"""Which chunk leaves a full tier first: vLLM's eviction policies `lru` (the default) and `arc` (0.32)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, Protocol

ChunkKey = int
"""The name of a chunk's content, as `BlockHasher` names the last of its blocks."""
PolicyName = Literal["lru", "arc"]
MayLeave = Callable[[ChunkKey], bool]


class EvictionPolicy(Protocol):
    """The order in which chunks leave. Pinned chunks keep their place in it, but stay."""

    def insert(self, key: ChunkKey) -> None:
        """A chunk comes in."""

    def evict(self, count: int, may_leave: MayLeave) -> list[ChunkKey] | None:
        """Exactly `count` chunks leave, or none if there are too few that may."""

    def learn(self, missed: Sequence[ChunkKey]) -> None:
        """A request wants to store these, which are not here."""

    def use(self, keys: Sequence[ChunkKey], inserted: Collection[ChunkKey], reused: Collection[ChunkKey]) -> None:
        """A request ended that used these, from the start of its prompt on.

        It only `inserted` some and `reused` others.
        """


class LruPolicy:
    """The least recently used first. A use is being stored, and the end of a request that used the chunk."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey) -> None:
        self._order[key] = None

    def evict(self, count: int, may_leave: MayLeave) -> list[ChunkKey] | None:
        leaving: list[ChunkKey] = []
        for key in self._order:
            if may_leave(key):
                leaving.append(key)
                if len(leaving) == count:
                    break
        else:
            return None
        for key in leaving:
            del self._order[key]
        return leaving

    def learn(self, missed: Sequence[ChunkKey]) -> None:
        """Recency knows nothing of chunks that are gone."""

    def use(self, keys: Sequence[ChunkKey], inserted: Collection[ChunkKey], reused: Collection[ChunkKey]) -> None:
        # The tail first: the start of a prompt is what others may share.
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)


class ArcPolicy:
    """Adaptive replacement: chunks used once and chunks used again, and a target between them that learns.

    What left lately is remembered by name. A request that wants such a chunk back moves the target in favour of the
    list it left from.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again: OrderedDict[ChunkKey, None] = OrderedDict()
        self._gone_once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._gone_again: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey) -> None:
        self._once[key] = None
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)

    def learn(self, missed: Sequence[ChunkKey]) -> None:
        once, again = self._gone_once, self._gone_again
        for key in reversed(missed):
            if key in once:
                self._target = min(self._target + max(1, len(again) / len(once)), self._capacity)
                once.move_to_end(key)
            elif key in again:
                self._target = max(self._target - max(1, len(once) / len(again)), 0)
                again.move_to_end(key)

    def use(self, keys: Sequence[ChunkKey], inserted: Collection[ChunkKey], reused: Collection[ChunkKey]) -> None:
        for key in reversed(keys):
            if key in inserted:
                # Being stored is no second use: the chunk is only as recent as its request.
                for order in (self._once, self._again):
                    if key in order:
                        order.move_to_end(key)
            elif key in reused and key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in reused and key in self._again:
                self._again.move_to_end(key)

    def evict(self, count: int, may_leave: MayLeave) -> list[ChunkKey] | None:
        once, again = filter(may_leave, self._once), filter(may_leave, self._again)
        size = len(self._once)
        leaving: list[tuple[ChunkKey, bool]] = []
        for _ in range(count):
            key = self._next(once) if size >= int(self._target) else None
            was_used_once = key is not None
            if key is None:
                key = self._next(again)
            if key is None:
                key = self._next(once)
                was_used_once = True
            if key is None:
                return None
            size -= was_used_once
            leaving.append((key, was_used_once))
        for key, was_used_once in leaving:
            del (self._once if was_used_once else self._again)[key]
            (self._gone_once if was_used_once else self._gone_again)[key] = None
        for gone in (self._gone_once, self._gone_again):
            while len(gone) > self._capacity:
                gone.popitem(last=False)
        return [key for key, _ in leaving]

    @staticmethod
    def _next(keys: Iterator[ChunkKey]) -> ChunkKey | None:
        return next(keys, None)


POLICIES: dict[PolicyName, Callable[[int], EvictionPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}
