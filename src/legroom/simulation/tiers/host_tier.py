"""The chunks of KV cache in host memory (vLLM 0.32's `CPUOffloadingManager`) and its eviction policies."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Generic, Literal, NamedTuple, TypeVar

from legroom.errors import LegroomError

ChunkKey = int
"""The hash of the last block of a chunk."""
PolicyName = Literal["lru", "arc"]
MayEvict = Callable[[ChunkKey], bool]


class LruPolicy:
    """Evicts the least recently used chunk. A chunk is used when it is stored, and when a request that used it ends."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey) -> None:
        """Add a stored chunk as the most recently used."""
        self._order[key] = None

    def evict(self, count: int, may_evict: MayEvict) -> list[ChunkKey] | None:
        """Evict exactly `count` chunks for which `may_evict` is true; None, evicting nothing, if there are too few."""
        evicted = list(islice(filter(may_evict, self._order), count))
        if len(evicted) < count:
            return None
        for key in evicted:
            del self._order[key]
        return evicted

    def on_miss(self, missed: Sequence[ChunkKey]) -> None:
        """Does nothing here; called when a request stores chunks that the tier does not hold."""

    def use(self, keys: Sequence[ChunkKey], inserted: Collection[ChunkKey], reused: Collection[ChunkKey]) -> None:
        """Makes the `keys` that an ending request used the most recent ones, the first of its prompt the very last."""
        for key in reversed(keys):  # the last chunk first: the start of a prompt is most likely shared
            if key in self._order:
                self._order.move_to_end(key)


class ArcPolicy(LruPolicy):
    """Adaptive replacement: chunks used once, chunks used again, and an adaptive target between them. Recently evicted
    chunks are remembered by key. A request that stores such a chunk again moves the target in favour of the list it was
    evicted from."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again: OrderedDict[ChunkKey, None] = OrderedDict()
        self._evicted_once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._evicted_again: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, key: ChunkKey) -> None:
        """Add a stored chunk to the list of chunks used once."""
        self._once[key] = None
        self._evicted_once.pop(key, None)
        self._evicted_again.pop(key, None)

    def on_miss(self, missed: Sequence[ChunkKey]) -> None:
        """Moves the target size in favour of the list (used once, used again) that a missed chunk was evicted from."""
        once, again = self._evicted_once, self._evicted_again
        for key in reversed(missed):
            if key in once:
                self._target = min(self._target + max(1, len(again) / len(once)), self._capacity)
                once.move_to_end(key)
            elif key in again:
                self._target = max(self._target - max(1, len(once) / len(again)), 0)
                again.move_to_end(key)

    def use(self, keys: Sequence[ChunkKey], inserted: Collection[ChunkKey], reused: Collection[ChunkKey]) -> None:
        """Moves an ending request's `reused` keys to the chunks used again; storing (`inserted`) is no such use."""
        for key in reversed(keys):
            if key in inserted:
                # Being stored is no second use.
                for order in (self._once, self._again):
                    if key in order:
                        order.move_to_end(key)
            elif key in reused and key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in reused and key in self._again:
                self._again.move_to_end(key)

    def evict(self, count: int, may_evict: MayEvict) -> list[ChunkKey] | None:
        """Evicts exactly `count` chunks by ARC's target sizes; None, evicting nothing, if `may_evict` allows fewer."""
        once, again = filter(may_evict, self._once), filter(may_evict, self._again)
        size = len(self._once)
        victims: list[tuple[ChunkKey, bool]] = []
        for _ in range(count):
            key = next(once, None) if size >= int(self._target) else None
            was_used_once = key is not None
            if key is None:
                key = next(again, None)
            if key is None:
                key = next(once, None)
                was_used_once = True
            if key is None:
                return None
            size -= was_used_once
            victims.append((key, was_used_once))
        for key, was_used_once in victims:
            del (self._once if was_used_once else self._again)[key]
            (self._evicted_once if was_used_once else self._evicted_again)[key] = None
        for evicted in (self._evicted_once, self._evicted_again):
            while len(evicted) > self._capacity:
                evicted.popitem(last=False)
        return [key for key, _ in victims]


POLICIES: dict[PolicyName, type[LruPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}


@dataclass(frozen=True)
class TierSettings:
    """Capacity of the host tier, and the speed of copies."""

    num_chunks: int
    blocks_per_chunk: int = 1
    """Blocks that are stored, loaded and evicted together (`blocks_per_chunk` of the connector)."""
    policy: PolicyName = "lru"
    store_threshold: int = 0
    """How often a chunk must be offered before it is stored, if 2 or more."""
    max_tracker_size: int = 64_000
    """Most chunks whose offers are counted."""
    prompt_only: bool = True
    """Generated tokens are not stored (`offload_prompt_only`, the default of 0.32)."""
    block_bytes: int = 0
    """Of one block over all ranks; 0: unknown."""
    load_s_per_block: float = 0.0
    store_s_per_block: float = 0.0
    disk_s_per_chunk: float | None = None
    """Of the disk tier, each way; None: no disk tier."""

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise LegroomError("a tier that cannot hold one chunk stores nothing", "give the tier more room")
        if self.blocks_per_chunk < 1:
            raise LegroomError(f"blocks_per_chunk is {self.blocks_per_chunk}, but must be at least 1")
        if self.policy not in POLICIES:
            raise LegroomError(f"no eviction policy {self.policy!r}", "vLLM has lru and arc")
        if self.disk_s_per_chunk is not None and self.store_threshold >= 2:
            raise LegroomError("vLLM refuses store_threshold together with a tier of files", "leave out one of them")


WRITING = -1
"""As the number of readers of a chunk that is being written."""


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    PENDING = auto()
    """Present, but still being written."""
    RETRY = auto()
    """Unknown until the next step."""


class ChunkAccess:
    """The chunks of one request, and which of them it used; the eviction policy learns these when it ends."""

    def __init__(self) -> None:
        self.positions: dict[ChunkKey, int] = {}
        """Of all its chunks, counted from the start of the prompt."""
        self.used: set[ChunkKey] = set()
        self.inserted: set[ChunkKey] = set()
        self.reused: set[ChunkKey] = set()
        self.wanted: set[ChunkKey] = set()
        """Chunks that it tried to store and the tier did not hold."""
        self.stores_in_progress = 0
        self.is_finished = False

    def reuse(self, keys: Iterable[ChunkKey]) -> None:
        """Records that the request used these chunks of the tier; those it stored itself do not count as reused."""
        self.used.update(keys)
        self.reused.update(key for key in keys if key not in self.inserted)


class FileTally(NamedTuple):
    """Chunks copied to and from files."""

    stored_chunks: int
    loaded_chunks: int
    store_busy_s: float
    load_busy_s: float


Job = TypeVar("Job")


class Link(Generic[Job]):
    """One direction of copies: each starts when the one before it has ended."""

    def __init__(self, s_per_block: float) -> None:
        self.s_per_block = s_per_block
        self.busy_s = 0.0
        """Sum of the seconds that all copies take."""
        self._free_at_s = 0.0
        self._queue: deque[tuple[Job, float]] = deque()

    def submit(self, job: Job, num_blocks: int, now_s: float) -> float:
        """Queues a copy of `num_blocks` blocks behind those under way; returns when it ends, in replay seconds."""
        took = num_blocks * self.s_per_block
        self.busy_s += took
        self._free_at_s = max(self._free_at_s, now_s) + took
        self._queue.append((job, self._free_at_s))
        return self._free_at_s

    def end_of(self, jobs: Container[Job], now_s: float) -> float:
        """When the last of these jobs ends, in seconds of the replay; `now_s` if none of them is under way."""
        return max((end for job, end in self._queue if job in jobs), default=now_s)

    @property
    def next_end_s(self) -> float | None:
        """When the oldest queued copy ends, in seconds of the replay; None where none is under way."""
        return self._queue[0][1] if self._queue else None

    def completed(self, now_s: float) -> list[Job]:
        """Removes and returns the copies that have ended by `now_s`, oldest first."""
        done: list[Job] = []
        while self._queue and self._queue[0][1] <= now_s:
            done.append(self._queue.popleft()[0])
        return done


class HostTier:
    """Host memory for a fixed number of chunks. Those that a transfer reads or writes are pinned: never evicted."""

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self.policy = POLICIES[settings.policy](settings.num_chunks)
        self.readers: dict[ChunkKey, int] = {}
        """Of every chunk here: the loads that read it, or -1 while it is being written."""
        self.num_idle = 0
        """Chunks that nothing reads or writes."""
        self.now_s = 0.0
        self.evicted_by_lookups: list[ChunkKey] = []
        self._offers: OrderedDict[ChunkKey, int] = OrderedDict()
        """How often chunks were offered, where a store needs several offers."""

    @property
    def has_work(self) -> bool:
        """Whether copies to or from the disk tier are in progress."""
        return False

    @property
    def next_event_s(self) -> float | None:
        """When the next copy to or from the disk tier ends, in seconds of the replay; None where none is under way."""
        return None

    def lookup(self, key: ChunkKey, access: ChunkAccess) -> LookupResult:
        """HIT where the chunk can be read, PENDING while it is being written, MISS where it is absent."""
        readers = self.readers.get(key)
        if readers is None:
            return LookupResult.MISS
        return LookupResult.PENDING if readers == WRITING else LookupResult.HIT

    def prepare_load(self, keys: Sequence[ChunkKey], access: ChunkAccess) -> None:
        """Pin chunks that are about to be read, and record that the request reuses them."""
        self._pin(keys)
        access.reuse(keys)

    def _pin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one more reader of each chunk, so that it is not evicted."""
        for key in keys:
            self.num_idle -= self.readers[key] == 0
            self.readers[key] += 1

    def complete_load(self, keys: Iterable[ChunkKey]) -> None:
        """Count one reader less of each chunk; those without readers may be evicted again."""
        for key in keys:
            self.readers[key] -= 1
            self.num_idle += self.readers[key] == 0

    def prepare_store(
        self, keys: Sequence[ChunkKey], access: ChunkAccess
    ) -> tuple[list[ChunkKey], list[ChunkKey]] | None:
        """Makes room for those of `keys` that are missing: (the chunks to write, those evicted); None without room."""
        missing = [key for key in keys if key not in self.readers]
        if self.settings.store_threshold >= 2:
            self._count_offers(keys)
            missing = [key for key in missing if self._offers.get(key, 0) >= self.settings.store_threshold]
        first_missed = [key for key in missing if key not in access.wanted]
        if first_missed:
            self.policy.on_miss(first_missed)
            access.wanted.update(first_missed)
        access.reuse([key for key in keys if self.readers.get(key, WRITING) != WRITING])
        access.used.update(missing)
        if not missing:
            return [], []
        evicted = self._make_room(len(missing), set(keys))
        if evicted is None:
            return None
        for key in missing:
            self.readers[key] = WRITING
            self.policy.insert(key)
        access.inserted.update(missing)
        return missing, evicted

    def _count_offers(self, keys: Sequence[ChunkKey]) -> None:
        """Counts an offer of each chunk, for a bounded number of recent chunks; a new one drops none of `keys`."""
        offers = self._offers
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
        """Evicts enough chunks, none of `protected`, for `count` new ones: the evicted; None if too few may go."""
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
        """Mark written chunks as readable and evictable."""
        for key in keys:
            self.readers[key] = 0
        self.num_idle += len(keys)

    def file_tally(self) -> FileTally | None:
        """Chunks written to and read from files; None for a tier without files."""
        return None

    def end_schedule(self) -> None:
        """Does nothing here; called after a step is scheduled and before its stores, for a tier with files."""

    def end_request(self, access: ChunkAccess) -> None:
        """Report the chunks that the request used to the eviction policy, in prompt order."""
        keys = sorted(access.used, key=access.positions.__getitem__)
        self.policy.use(keys, access.inserted - access.reused, access.reused)
