"""The parts of a reading, and the allocator settings that would have served a failed request."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from legroom.black_box import AllocatorSegment, AllocatorState
from legroom.live.thresholds import DEFAULT
from legroom.memory.allocator_replay import AllocatorHistory, RefusedRequest, SettingTried, try_settings
from legroom.memory.caching_allocator import LARGE_SEGMENT_BYTES, AllocatorSettings, segment_bytes
from legroom.records import dataclass
from legroom.units import GIB, MIB, human_bytes


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of code that allocated, and what it still holds."""

    place: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class KvSlots:
    """The KV pool as vLLM reports it."""

    running: int
    blocks: int
    block_size: int

    @property
    def empty_slots(self) -> int:
        """Expected number of empty token slots, as the last block of a request is half empty on average."""
        return round(self.running * (self.block_size - 1) / 2)


@dataclass(frozen=True, slots=True)
class AllocatorReading:
    """The allocator of one device. None or empty: the source does not say."""

    source: str
    device: str
    state: AllocatorState
    settings: AllocatorSettings
    requested_bytes: int | None = None
    """The requested size of all allocated blocks, before rounding."""
    history: AllocatorHistory | None = None
    refused: RefusedRequest | None = None
    sites: tuple[CallSite, ...] = ()
    non_torch_bytes: int | None = None
    non_torch_growth_bytes: int | None = None
    """Between the first and the last reading that the source has."""
    card_free_bytes: int | None = None
    others_bytes: int | None = None
    """Held on the card by other processes."""
    kv: KvSlots | None = None
    is_host: bool = False
    """Of a worker without a GPU: the memory of its process, of which PyTorch keeps no reserve."""


PartName = (
    Literal["allocated", "rounding", "free_whole_segments", "free_in_pieces", "graph_pools", "non_torch"]
    | Literal["non_torch_growth", "others", "kv_last_blocks", "failed_request", "leak"]
)
_SPLIT_SIZES_MIB = (32, 64, 128, 256, 512)
_MIN_LEAK_BYTES = MIB
_MIN_OTHERS_BYTES = GIB  # Below this it is the driver's own.
_MAX_SITES = 8


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of the memory, or one finding about it; `bytes` is None where unknown."""

    part: PartName
    bytes: int | None
    text: str
    details: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "bytes": self.bytes, "text": self.text, **self.details}


@dataclass(frozen=True, slots=True)
class FragmentReport:
    reading: AllocatorReading
    parts: tuple[MemoryPart, ...]
    would_expandable_segments_help: bool | None
    """None: nothing failed, or the source has too little information."""

    @property
    def largest_free_bytes(self) -> int | None:
        """The largest free block outside private pools; None where the source does not report it."""
        return self.reading.state.largest_free_bytes

    @property
    def fragmentation_ratio(self) -> float | None:
        """1 - largest free piece / free bytes; 0 if nothing is free; None where unknown."""
        free, largest = self.reading.state.usable_free_bytes, self.largest_free_bytes
        if free <= 0:
            return 0.0
        return None if largest is None else round(max(0.0, 1 - largest / free), 4)

    @property
    def has_problem(self) -> bool:
        """Whether a request failed, memory leaks, or fragmentation is high."""
        return bool(self.part("failed_request") or self.part("leak") or self.is_fragmented)

    @property
    def is_fragmented(self) -> bool:
        """Whether free pieces between used blocks are at least 1 GiB and 15 % of the reserved bytes, as for `watch`."""
        part, reserved = self.part("free_in_pieces"), self.reading.state.reserved_bytes
        least = max(DEFAULT.fragmentation_bytes, DEFAULT.fragmentation_ratio * reserved)
        return part is not None and (part.bytes or 0) >= least

    def part(self, name: PartName) -> MemoryPart | None:
        """The report's part of this name; None where it has none."""
        return next((part for part in self.parts if part.part == name), None)

    def to_json(self) -> dict[str, Any]:
        state = self.reading.state
        return {
            "allocated_bytes": state.allocated_bytes,
            "reserved_bytes": state.reserved_bytes,
            "largest_free_bytes": self.largest_free_bytes,
            "fragmentation_ratio": self.fragmentation_ratio,
            "would_expandable_segments_help": self.would_expandable_segments_help,
            "parts": [part.to_json() for part in self.parts],
        }


def fragment_report(
    reading: AllocatorReading, *, needed_bytes: int | None = None, earlier: AllocatorReading | None = None
) -> FragmentReport:
    """The parts of a reading and of its growth since `earlier`, and the settings that would have served its refused
    request. `needed_bytes`: judge a request of this size instead, refused if no free piece has it."""
    if needed_bytes is not None:
        fits = needed_bytes <= (reading.state.largest_free_bytes or 0)
        reserved = reading.state.reserved_bytes
        refused = RefusedRequest(needed_bytes, reserved, reading.card_free_bytes, reserved)
        reading = replace(reading, refused=None if fits else refused, history=None)
    tried = _try_candidate_settings(reading)
    expandable = next((served for settings, served in tried if settings.expandable_segments), None)
    if reading.refused is not None and reading.settings.expandable_segments:
        expandable = False  # they are on already
    parts = [*_state_parts(reading), *_non_torch_parts(reading)]
    if reading.refused is not None:
        parts.append(_failed_request_part(reading, reading.refused, tried, asked=needed_bytes is not None))
    if earlier is not None:
        parts += _growth_parts(earlier, reading)
    return FragmentReport(reading, tuple(parts), expandable)


def _candidate_settings(settings: AllocatorSettings) -> Iterable[AllocatorSettings]:
    """Allocator settings to try: expandable segments, and max_split_size_mb values other than the present one."""
    if not settings.expandable_segments:
        yield replace(settings, expandable_segments=True)
    for size in _SPLIT_SIZES_MIB:
        if settings.max_split_bytes != size * MIB:
            yield replace(settings, expandable_segments=False, max_split_bytes=size * MIB)


def _try_candidate_settings(reading: AllocatorReading) -> tuple[SettingTried, ...]:
    """Each other allocator setting with whether it would have served the refused request; empty if none is to try."""
    if reading.refused is None:
        return ()
    if reading.history is not None:
        candidates = _candidate_settings(reading.settings)
        tried = tuple(try_settings(reading.history, reading.refused, reading.settings, candidates))
        if tried:
            return tried
    if reading.settings.expandable_segments:
        return ()
    served = _served_by_expandable_segments(reading, reading.refused)
    return ((replace(reading.settings, expandable_segments=True), served),)


def _served_by_expandable_segments(reading: AllocatorReading, request: RefusedRequest) -> bool | None:
    """Whether expandable segments, which return every free page, would have served the request; None if unclear."""
    state = reading.state
    allocated = state.allocated_bytes + (state.private_free_bytes or 0)
    needed = segment_bytes(reading.settings.rounded(request.size_bytes))
    limit = request.reserved_bytes
    if request.card_free_bytes is not None and request.card_free_bytes < needed:
        limit += request.card_free_bytes
        if allocated + needed > limit:
            return False
    elif allocated >= limit:
        return False  # nothing is free in the reserve
    free_blocks = sum(block.state == "free" for segment in state.segments for block in segment.blocks)
    partly_used = min(LARGE_SEGMENT_BYTES * max(free_blocks, 1), state.unallocated_bytes)
    return True if allocated + needed + partly_used <= limit else None


def _state_parts(reading: AllocatorReading) -> Iterable[MemoryPart]:
    """The parts of PyTorch's reserved memory: allocated, rounding, private pools, free segments, free pieces."""
    state = reading.state
    if reading.is_host:
        text = "of the host, held by the worker's process: without a GPU PyTorch keeps no reserve that could fragment"
        yield MemoryPart("allocated", state.allocated_bytes, text, {})
        return
    yield MemoryPart("allocated", state.allocated_bytes, "handed out to tensors", {})
    if reading.requested_bytes is not None and state.allocated_bytes > reading.requested_bytes:
        rounding = state.allocated_bytes - reading.requested_bytes
        yield MemoryPart("rounding", rounding, "of that, more than was asked for: blocks are rounded up", {})
    private = state.private_pool_bytes or state.graph_pool_bytes or 0
    private_free = state.private_free_bytes or 0
    if private:
        text = "reserved by private pools (CUDA graphs): what is free there serves nobody else"
        yield MemoryPart("graph_pools", private, text, {"free_bytes": private_free})
    pieces = _fragmented_bytes(reading)
    if pieces is None:
        yield MemoryPart("free_in_pieces", state.usable_free_bytes, "reserved and free; how it lies is not told", {})
        return
    whole = max(state.usable_free_bytes - pieces, 0)
    if whole:
        yield MemoryPart("free_whole_segments", whole, "free in whole segments or pages: goes back when needed", {})
    partly_used = [segment for segment in state.segments if not segment.pool and segment.allocated_bytes]
    count = sum(block.state == "free" for segment in partly_used for block in segment.blocks)
    details: dict[str, Any] = {"pieces": count} if state.segments else {}
    text = "free between blocks in use: it serves requests that fit a piece, and cannot go back to the card"
    yield MemoryPart("free_in_pieces", pieces, text, details)


def _fragmented_bytes(reading: AllocatorReading) -> int | None:
    """Free bytes, not of private pools, in partly used segments (expandable: pages); None if not reported."""
    state = reading.state
    if not state.segments:
        split = state.inactive_split_bytes
        return None if split is None else min(split, state.usable_free_bytes)
    return sum(
        _partial_page_bytes(segment) if segment.is_expandable else segment.size_bytes - segment.allocated_bytes
        for segment in state.segments
        if not segment.pool and segment.allocated_bytes
    )


def _partial_page_bytes(segment: AllocatorSegment) -> int:
    """The free bytes of an expandable segment in partly used pages, which cannot be unmapped."""
    page = 2 * MIB if segment.is_small else LARGE_SEGMENT_BYTES
    offset = rests = 0
    for block in segment.blocks:
        end = offset + block.size_bytes
        if block.state == "free":
            whole = max(0, end // page * page - -(-offset // page) * page)
            rests += block.size_bytes - whole
        offset = end
    return rests


def _non_torch_parts(reading: AllocatorReading) -> Iterable[MemoryPart]:
    """What the process holds outside PyTorch, other processes' memory, and empty slots of KV blocks."""
    if reading.non_torch_bytes is not None:
        text = "held by the process beside PyTorch: context, modules, communication, graphs"
        yield MemoryPart("non_torch", reading.non_torch_bytes, text, {})
    if reading.non_torch_growth_bytes is not None and abs(reading.non_torch_growth_bytes) >= _MIN_LEAK_BYTES:
        growth = reading.non_torch_growth_bytes
        yield MemoryPart("non_torch_growth", growth, "change of that between the first look and the last", {})
    if (others := reading.others_bytes) is not None and others >= _MIN_OTHERS_BYTES:
        yield MemoryPart("others", others, "held by other processes on the same card", {})
    if (kv := reading.kv) is not None and kv.running:
        share = kv.empty_slots / max(kv.blocks * kv.block_size, 1)
        text = (
            f"about {kv.empty_slots:,} token slots in the last blocks of {kv.running:,} running requests are empty: "
            f"{share:.2%} of the KV pool"
        )
        details = {"slots": kv.empty_slots, "share_of_pool": round(share, 6), "running": kv.running}
        yield MemoryPart("kv_last_blocks", None, text, details)


def _failed_request_part(
    reading: AllocatorReading, request: RefusedRequest, tried: Sequence[SettingTried], *, asked: bool
) -> MemoryPart:
    """The refused request and the settings that would have served it; `asked`: the user gave its size."""
    served = [settings.as_text() for settings, is_served in tried if is_served]
    refused = [settings.as_text() for settings, is_served in tried if is_served is False]
    free, size = reading.state.usable_free_bytes, human_bytes(request.size_bytes)
    what = f"no free piece has {size}" if asked else f"{size} could not be served"
    if served:
        text = f"{what}, though {human_bytes(free)} were free: {served[0]} would have served it"
    elif refused and (reading.others_bytes or 0) >= max(request.size_bytes, _MIN_OTHERS_BYTES):
        others = human_bytes(reading.others_bytes or 0)
        text = f"{what}, and no setting of the allocator would have helped: other processes hold {others} of the card"
    elif refused:
        text = f"{what}, and no setting of the allocator would have helped: too little was free"
    elif reading.settings.expandable_segments:
        text = f"{what}, with expandable segments on: too little was free"
    else:
        text = f"{what}; whether a setting would have helped cannot be told from this source"
    details = {
        "asked": asked,
        "served_by": served,
        "refused_by": refused,
        "replayed": bool(reading.history is not None and len(tried) > 1),
        "card_free_bytes": request.card_free_bytes,
    }
    return MemoryPart("failed_request", request.size_bytes, text, details)


def _growth_parts(earlier: AllocatorReading, later: AllocatorReading) -> Iterable[MemoryPart]:
    """What grew between two readings: memory outside PyTorch, and allocations by call site where recorded."""
    if earlier.non_torch_bytes is not None and later.non_torch_bytes is not None:
        growth = later.non_torch_bytes - earlier.non_torch_bytes
        if abs(growth) >= _MIN_LEAK_BYTES:
            yield MemoryPart("non_torch_growth", growth, "change of what is held beside PyTorch", {})
    grown = grown_sites(earlier.sites, later.sites)
    if grown:
        total = sum(site.bytes for site in grown)
        worst = grown[0]
        text = (
            f"{human_bytes(total)} more are allocated than before; {human_bytes(worst.bytes)} of them in "
            f"{worst.blocks:,} blocks from {worst.place}"
        )
        yield MemoryPart("leak", total, text, {"sites": [asdict(site) for site in grown[:_MAX_SITES]]})
    elif not (earlier.sites and later.sites):
        growth = later.state.allocated_bytes - earlier.state.allocated_bytes
        if growth >= _MIN_LEAK_BYTES:
            text = f"{human_bytes(growth)} more are allocated than before; no source names the place"
            yield MemoryPart("leak", growth, text, {"sites": []})


def grown_sites(earlier: Sequence[CallSite], later: Sequence[CallSite]) -> list[CallSite]:
    """The growth of each call site that has at least 1 MiB and one block more than before; the largest first."""
    before = {site.place: site for site in earlier}
    grown = []
    for site in later:
        was = before.get(site.place, CallSite(site.place, 0, 0))
        growth = CallSite(site.place, site.bytes - was.bytes, site.blocks - was.blocks)
        if growth.bytes >= _MIN_LEAK_BYTES and growth.blocks > 0:
            grown.append(growth)
    return sorted(grown, key=lambda site: -site.bytes)
