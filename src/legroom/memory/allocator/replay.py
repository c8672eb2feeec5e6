"""A recorded history of requests, answered again by the model under other settings: would the refused one be served?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from legroom.memory.allocator.caching_allocator import CachedBlock, CachingAllocator, RequestRefused
from legroom.memory.allocator.settings import AllocatorSettings, segment_bytes
from legroom.records import dataclass

Action = Literal["allocate", "free", "give_back", "refused"]
"""`give_back`: all that was free went back to the card, as after `empty_cache()`."""


_LIMITS_TRIED = 5


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    action: Action
    address: int = 0
    size_bytes: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """The request that ended in OutOfMemoryError, and what the process had then."""

    size_bytes: int
    reserved_bytes: int
    """When all that could be given back had been given back."""
    card_free_bytes: int | None
    peak_reserved_bytes: int
    """The most that was ever reserved: a limit, if there is one, is not below it."""


@dataclass(frozen=True, slots=True)
class AllocatorHistory:
    """`first`: what was allocated when the recording began, as (address, bytes, stream) in the order of addresses."""

    first: tuple[tuple[int, int, int], ...]
    events: tuple[AllocatorEvent, ...]


def answers_again(
    history: AllocatorHistory, settings: AllocatorSettings, limit_bytes: int | None, card_bytes: int | None
) -> bool | None:
    """Whether the last refused request is served under `settings`; None where an earlier one already fails."""
    allocator = CachingAllocator(settings, limit_bytes, card_bytes)
    live: dict[int, CachedBlock] = {}
    served: bool | None = None
    last = max((i for i, event in enumerate(history.events) if event.action == "refused"), default=-1)
    try:
        for address, size, stream in history.first:
            live[address] = allocator.allocate(size, stream)
        for event in history.events[:last]:
            _apply(allocator, live, event)
    except RequestRefused:
        return None
    if last >= 0:
        request = history.events[last]
        try:
            allocator.allocate(request.size_bytes, request.stream)
            served = True
        except RequestRefused:
            served = False
    return served


def _apply(allocator: CachingAllocator, live: dict[int, CachedBlock], event: AllocatorEvent) -> None:
    if event.action == "allocate":
        live[event.address] = allocator.allocate(event.size_bytes, event.stream)
    elif event.action == "free":
        block = live.pop(event.address, None)
        if block is not None:
            allocator.free(block)
    elif event.action == "give_back":
        allocator.empty_cache()


@dataclass(frozen=True, slots=True)
class SettingTried:
    settings: AllocatorSettings
    served: bool | None
    """None: it depends on a limit that the recording does not tell, or the model cannot say."""


def possible_limits(request: RefusedRequest, settings: AllocatorSettings) -> list[tuple[int | None, int | None]]:
    """(limit of the process, limit of the card): the one that was met, or several between the lowest and the highest
    that fit with the refusal."""
    needed = segment_bytes(settings.rounded(request.size_bytes))
    if request.card_free_bytes is not None and request.card_free_bytes < needed:
        return [(None, request.reserved_bytes + request.card_free_bytes)]
    highest = request.reserved_bytes + needed - 1
    lowest = min(max(request.peak_reserved_bytes, request.reserved_bytes), highest)
    steps = _LIMITS_TRIED - 1
    return [(lowest + (highest - lowest) * step // steps, None) for step in range(_LIMITS_TRIED)]


def try_settings(
    history: AllocatorHistory,
    request: RefusedRequest,
    recorded: AllocatorSettings,
    candidates: Iterable[AllocatorSettings],
) -> Iterator[SettingTried]:
    """Each candidate's answer to the refused request; nothing where the model does not see it refused as recorded."""
    limits = possible_limits(request, recorded)
    if any(answers_again(history, recorded, *limit) is not False for limit in limits):
        return
    for settings in candidates:
        yield SettingTried(settings, _agreed([answers_again(history, settings, *limit) for limit in limits]))


def _agreed(answers: list[bool | None]) -> bool | None:
    """What the limits that the history fits under agree on: at the very lowest an earlier request may lack a page."""
    known = {answer for answer in answers if answer is not None}
    is_mostly_known = 2 * answers.count(None) < len(answers)
    return known.pop() if len(known) == 1 and is_mostly_known else None
