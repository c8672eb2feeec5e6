"""The chunks of KV cache that the host holds (vLLM 0.32's `CPUOffloadingManager`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from legroom.simulation.tiers.policies import POLICIES, ChunkKey
from legroom.simulation.tiers.settings import TierSettings

_WRITING = -1


class LookupResult(Enum):
    """What a lookup says."""

    MISS = auto()
    HIT = auto()
    PENDING = auto()
    """Here, but still being written."""
    RETRY = auto()
    """Not known yet."""


class ChunkAccess:
    """What one request did with the tier; the eviction policy hears of it once, when the request ends."""

    __slots__ = ("inserted", "is_finished", "positions", "reused", "stores_under_way", "wanted")

    def __init__(self) -> None:
        self.positions: dict[ChunkKey, int] = {}
        self.inserted: set[ChunkKey] = set()
        self.reused: set[ChunkKey] = set()
        self.wanted: set[ChunkKey] = set()
        self.stores_under_way = 0
        self.is_finished = False

    def record(self, keys: Iterable[ChunkKey], places: dict[ChunkKey, int]) -> None:
        for key in keys:
            self.positions[key] = places[key]

    def reuse(self, keys: Iterable[ChunkKey]) -> None:
        """Reading back what it stored itself is no reuse."""
        self.reused.update(key for key in keys if key not in self.inserted)


class FileTally(NamedTuple):
    """What went to files and came back."""

    stored_chunks: int
    loaded_chunks: int
    store_busy_s: float
    load_busy_s: float


class HostTier:
    """A fixed number of chunks. Those that a transfer reads or writes are pinned."""

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self.policy = POLICIES[settings.policy](settings.num_chunks)
        self.readers: dict[ChunkKey, int] = {}
        """Of every chunk here: the loads that read it, or -1 while it is being written."""
        self.num_idle = 0
        self.now_s = 0.0
        self.evicted_by_lookups: list[ChunkKey] = []
        self._offers: OrderedDict[ChunkKey, int] | None = OrderedDict() if settings.store_threshold >= 2 else None

    @property
    def has_work(self) -> bool:
        """Whether copies to or from a tier behind this one are under way."""
        return False

    @property
    def next_event_s(self) -> float | None:
        """When the next of those copies ends."""
        return None

    def lookup(self, key: ChunkKey, places: dict[ChunkKey, int], access: ChunkAccess) -> LookupResult:
        readers = self.readers.get(key)
        if readers is None:
            return LookupResult.MISS
        return LookupResult.PENDING if readers == _WRITING else LookupResult.HIT

    def prepare_load(self, keys: Sequence[ChunkKey], places: dict[ChunkKey, int], access: ChunkAccess) -> None:
        """Pin chunks that are about to be read."""
        self._pin(keys)
        access.record(keys, places)
        access.reuse(keys)

    def _pin(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self.num_idle -= self.readers[key] == 0
            self.readers[key] += 1

    def complete_load(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self.readers[key] -= 1
            self.num_idle += self.readers[key] == 0

    def prepare_store(
        self, keys: Sequence[ChunkKey], places: dict[ChunkKey, int], access: ChunkAccess
    ) -> tuple[list[ChunkKey], list[ChunkKey]] | None:
        """The chunks to write and those evicted for them; None if there is no room."""
        missing, ready = self._sort_offer(keys)
        news = [key for key in missing if key not in access.wanted]
        if news:
            self.policy.learn(news)
            access.wanted.update(news)
        access.record(ready, places)
        access.record(missing, places)
        access.reuse(ready)
        if not missing:
            return [], []
        evicted = self._make_room(len(missing), set(keys))
        if evicted is None:
            return None
        for key in missing:
            self.readers[key] = _WRITING
            self.policy.insert(key)
        access.inserted.update(missing)
        return missing, evicted

    def _sort_offer(self, keys: Sequence[ChunkKey]) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Those to store, and those here and readable."""
        offers = self._offers
        if offers is not None:
            self._count_offer(keys, offers)
        missing = [key for key in keys if key not in self.readers]
        if offers is not None:
            missing = [key for key in missing if offers.get(key, 0) >= self.settings.store_threshold]
        return missing, [key for key in keys if self.readers.get(key, _WRITING) != _WRITING]

    def _count_offer(self, keys: Sequence[ChunkKey], offers: OrderedDict[ChunkKey, int]) -> None:
        """Count how often each chunk was offered, without forgetting one of this offer for another of it."""
        known = {key for key in keys if key in offers}
        for key in keys:
            if key in known:
                offers.move_to_end(key)
                offers[key] += 1
        others = len(offers) - len(known)
        for key in keys:
            if key in offers:
                continue
            if len(offers) >= self.settings.max_tracker_size:
                if others == 0:
                    continue
                offers.popitem(last=False)
                others -= 1
            offers[key] = 1

    def _make_room(self, count: int, protected: set[ChunkKey]) -> list[ChunkKey] | None:
        short = count - (self.settings.num_chunks - len(self.readers))
        if short <= 0:
            return []
        if short > self.num_idle:
            return None
        evicted = self.policy.evict(short, lambda key: self.readers[key] == 0 and key not in protected)
        if evicted is not None:
            self.num_idle -= len(evicted)
            for key in evicted:
                del self.readers[key]
        return evicted

    def complete_store(self, keys: Sequence[ChunkKey], access: ChunkAccess) -> None:
        for key in keys:
            if self.readers.get(key) == _WRITING:
                self.readers[key] = 0
                self.num_idle += 1

    def file_tally(self) -> FileTally | None:
        """None where there are no files."""
        return None

    def end_schedule(self) -> None:
        """A step is decided, but for what it stores."""

    def end_request(self, access: ChunkAccess) -> None:
        """Tell the policy what the request used, from the start of its prompt on."""
        keys = sorted(access.positions, key=access.positions.__getitem__)
        self.policy.use(keys, access.inserted - access.reused, access.reused)
