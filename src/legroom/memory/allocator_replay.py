"""Replays a recorded allocator history under other settings: is the request that ran out of memory served?"""

from collections.abc import Iterable, Iterator
from typing import Literal

from legroom.memory.caching_allocator import AllocatorSettings, Block, CachingAllocator, CudaOutOfMemory, segment_bytes
from legroom.records import dataclass

Action = Literal["allocate", "free", "empty_cache", "oom"]


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    action: Action
    address: int = 0
    size_bytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """The request that raised OutOfMemoryError, and the memory of the process at that time."""

    size_bytes: int
    reserved_bytes: int
    """After the cache was emptied."""
    card_free_bytes: int | None
    peak_reserved_bytes: int
    """The memory limit of the process, if there is one, is not below this."""


@dataclass(frozen=True, slots=True)
class AllocatorHistory:
    """`first`: blocks allocated before the recording, as (address, bytes, stream) in address order."""

    first: tuple[tuple[int, int, int], ...]
    events: tuple[AllocatorEvent, ...]


def replay_serves_request(
    history: AllocatorHistory, settings: AllocatorSettings, process_limit_bytes: int | None, card_bytes: int | None
) -> bool | None:
    """Whether the history's last out-of-memory request fits under these limits; None if it has none, or an earlier
    allocation fails. None as a limit: unlimited."""
    allocator = CachingAllocator(settings, process_limit_bytes, card_bytes)
    live: dict[int, Block] = {}
    last = max((i for i, event in enumerate(history.events) if event.action == "oom"), default=-1)
    if last < 0:
        return None
    try:
        for address, size, stream in history.first:
            live[address] = allocator.allocate(size, stream)
        for event in history.events[:last]:
            # Repeats one recorded event on the allocator; `live` maps recorded addresses to blocks.
            if event.action == "allocate":
                live[event.address] = allocator.allocate(event.size_bytes, event.stream)
            elif event.action == "free":
                block = live.pop(event.address, None)
                if block is not None:
                    allocator.free(block)
            elif event.action == "empty_cache":
                allocator.empty_cache()
    except CudaOutOfMemory:
        return None
    request = history.events[last]
    try:
        allocator.allocate(request.size_bytes, request.stream)
    except CudaOutOfMemory:
        return False
    return True


SettingTried = tuple[AllocatorSettings, bool | None]
"""Settings, and whether they serve the request; None: it depends on a limit that the recording does not hold, or the
replay fails earlier."""


def consistent_limits(request: RefusedRequest, settings: AllocatorSettings) -> list[tuple[int | None, int | None]]:
    """Pairs of (process limit, card limit) in bytes, None for none, under which the request is refused: the card's own
    where that explains it, else five process limits from the least possible to the highest."""
    needed = segment_bytes(settings.rounded(request.size_bytes))
    if request.card_free_bytes is not None and request.card_free_bytes < needed:
        return [(None, request.reserved_bytes + request.card_free_bytes)]
    highest = request.reserved_bytes + needed - 1
    lowest = min(max(request.peak_reserved_bytes, request.reserved_bytes), highest)
    return [(lowest + (highest - lowest) * step // 4, None) for step in range(5)]


def try_settings(
    history: AllocatorHistory,
    request: RefusedRequest,
    recorded: AllocatorSettings,
    candidates: Iterable[AllocatorSettings],
) -> Iterator[SettingTried]:
    """Yields each candidate with whether it would have served the request (None: unclear); nothing at all if a replay
    with the `recorded` settings does not refuse the request, as the log did."""
    limits = consistent_limits(request, recorded)
    if any(replay_serves_request(history, recorded, *limit) is not False for limit in limits):
        return
    for settings in candidates:
        yield settings, _agreed([replay_serves_request(history, settings, *limit) for limit in limits])


def _agreed(answers: list[bool | None]) -> bool | None:
    """The answer that all replays with one give; None if answers differ, or at least half of the replays have none."""
    known = {answer for answer in answers if answer is not None}
    return known.pop() if len(known) == 1 and 2 * answers.count(None) < len(answers) else None
