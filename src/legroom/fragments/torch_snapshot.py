"""Reads a memory snapshot of `torch.cuda.memory._dump_snapshot` or `_snapshot`, from torch 2.1 on.

The file may come from anywhere, so nothing in it is run: it is read by `pickle`'s own reader with an allow-list of
opcodes that make lists, dicts, tuples, text and numbers; any other opcode ends the reading. What it makes is counted,
so that a small file cannot fill the memory.
"""

import io
import pickle
import pickletools
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from legroom.black_box import AllocatorSegment, AllocatorState, SegmentBlock
from legroom.errors import LegroomError
from legroom.fragments.fragment_report import AllocatorReading, CallSite
from legroom.memory.allocator_replay import AllocatorEvent, AllocatorHistory, RefusedRequest
from legroom.memory.caching_allocator import AllocatorSettings
from legroom.records import dataclass

MAX_FILE_BYTES = 256 << 20
MAX_MADE_BYTES = 2 << 30
_CONTAINER_BYTES, _SCALAR_BYTES = 120, 32
"""About what CPython takes for an empty container with its slot, and for a number or a reference."""
_MAX_NUMBER_BITS = 512
_CONTAINERS = ("MARK", "EMPTY_LIST", "EMPTY_DICT", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "BINFLOAT")
_LONGS = ("LONG", "LONG1", "LONG4")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING")
_OTHERS = (
    *("PROTO", "FRAME", "STOP", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET"),
    "LONG_BINGET",
)
_DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError, struct.error)


class NotPlainData(LegroomError):
    """A pickle that holds more than plain data, is cut short, or is too large."""


class _Opcodes(dict[int, Callable[[Any], None]]):
    """The handlers of the allowed opcodes; any other opcode ends the reading."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        name = next((name for name, known in _CODES.items() if ord(known) == code), f"0x{code:02x}")
        hint = "a snapshot of torch.cuda.memory._dump_snapshot holds plain data alone"
        raise NotPlainData(f"the pickle is not plain data ({name}); nothing was run", hint)


class _PlainUnpickler(pickle._Unpickler):
    """Reads plain data and counts the bytes that it makes."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes, max_made_bytes: int) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.bytes_left = max_made_bytes

    def count_bytes(self, count: int) -> None:
        """Counts bytes of unpickled objects; raises NotPlainData above the limit."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise NotPlainData("the pickle makes more data than legroom reads", "record a shorter history")

    def set_items(self, items: list[Any]) -> None:
        """Sets the items (key, value, key, value, ...) in the dict on top of the stack; only plain keys are allowed."""
        target: dict[Any, Any] = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a nested tuple can take forever.
            if not isinstance(key, str | int | float | bool | None):
                raise NotPlainData("the pickle has a key that is neither text nor a number")
            target[key] = value

    def load_dict(self) -> None:
        """The DICT opcode, with plain keys only."""
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)

    def load_setitem(self) -> None:
        """The SETITEM opcode, with a plain key only."""
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        """The SETITEMS opcode, with plain keys only."""
        self.set_items(self.pop_mark())


def _counted_opcode(name: str) -> Callable[[_PlainUnpickler], None]:
    """The handler of the pickle opcode `name`, which also counts the memory of the object that it makes."""
    code = ord(_CODES[name])
    overridden = {"DICT": "load_dict", "SETITEM": "load_setitem", "SETITEMS": "load_setitems"}.get(name)
    load: Any = getattr(_PlainUnpickler, overridden) if overridden else pickle._Unpickler.dispatch[code]
    cost = _CONTAINER_BYTES if name in _CONTAINERS else _SCALAR_BYTES

    def load_and_count(unpickler: _PlainUnpickler) -> None:
        """Runs the opcode and counts its object; NotPlainData beyond the limit or for a very long integer."""
        unpickler.count_bytes(cost)
        load(unpickler)
        if name in _TEXTS:
            unpickler.count_bytes(len(unpickler.stack[-1]))
        elif name in _LONGS and unpickler.stack[-1].bit_length() > _MAX_NUMBER_BITS:
            raise NotPlainData("the pickle holds a number that is no size or address")

    return load_and_count


_CODES = {opcode.name: opcode.code for opcode in pickletools.opcodes}
_PlainUnpickler.dispatch = _Opcodes(
    {ord(_CODES[name]): _counted_opcode(name) for name in (*_CONTAINERS, *_NUMBERS, *_LONGS, *_TEXTS, *_OTHERS)}
)


def is_pickle(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a pickle of protocol 2 or later, as torch writes."""
    return len(head) >= 2 and head[0] == pickle.PROTO[0] and 2 <= head[1] <= 5


def read_plain_pickle(content: bytes, max_made_bytes: int = MAX_MADE_BYTES) -> Any:
    """The data of a pickle of plain data; NotPlainData for other pickles, or if it makes more than `max_made_bytes`."""
    if not is_pickle(content):
        raise NotPlainData("this is no pickle of Python 3")
    try:
        return _PlainUnpickler(content, max_made_bytes).load()
    except _DAMAGED as error:
        raise NotPlainData(f"the pickle is cut short or damaged: {error}"[:200], "copy the whole file") from error


MAX_ENTRIES = 4_000_000
"""Most blocks and events: a list that the file refers to a thousand times counts a thousand times."""
_MAX_FRAMES = 48
_STATES = {"active_allocated": "allocated", "active_awaiting_free": "pending", "active_pending_free": "pending"}
_COMMON_POOL = (0, 0)
_GAINED = {"segment_alloc", "segment_map"}
_GIVEN_BACK = {"segment_free", "segment_unmap"}


def read_snapshot(content: bytes, max_made_bytes: int = MAX_MADE_BYTES) -> tuple[AllocatorReading, ...]:
    """The allocator of each device with memory in a torch snapshot, the fullest first; LegroomError for other data."""
    document = read_plain_pickle(content, max_made_bytes)
    if isinstance(document, list):  # before 2.1, and `torch.cuda.memory_snapshot()`: the segments alone
        document = {"segments": document}
    if not isinstance(document, dict) or not isinstance(document.get("segments"), list):
        hint = "write one with torch.cuda.memory._dump_snapshot"
        raise NotPlainData("the pickle is no memory snapshot of torch", hint)
    try:
        traces = document.get("device_traces")
        lists = traces if isinstance(traces, list) else []
        count = sum(len(trace) for trace in lists if isinstance(trace, list | tuple))
        count += sum(1 + len(segment["blocks"]) for segment in _checked_entries(document["segments"]))
        if count > MAX_ENTRIES:
            raise NotPlainData("the memory snapshot has more entries than legroom reads", "record fewer events")
        devices: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for segment in _checked_entries(document["segments"]):
            devices[_checked_size(segment.get("device", 0))].append(segment)
        readings = [_device_reading(document, device, segments) for device, segments in sorted(devices.items())]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LegroomError(f"the memory snapshot is damaged: {type(error).__name__}: {error}"[:200]) from error
    if not readings:
        raise LegroomError("the memory snapshot has no segment", "torch had reserved nothing when it was taken")
    return tuple(sorted(readings, key=lambda reading: -reading.state.reserved_bytes))


def _checked_entries(items: Any) -> Iterator[Mapping[str, Any]]:
    """The items of a list of dicts; TypeError where it is anything else."""
    if not isinstance(items, list | tuple):
        raise TypeError("a list is missing")
    for item in items:
        if not isinstance(item, dict):
            raise TypeError("an entry is no object")
        yield item


def _text_or_empty(value: Any) -> str:
    """The value if it is a string, else ""; other values are never converted, because nested data can be huge."""
    return value if isinstance(value, str) else ""


def _checked_size(value: Any) -> int:
    """The value, which must be an integer from 0 to below 2**63; ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError("a size or an address is none")
    return value


@dataclass(frozen=True, slots=True)
class _LiveBlock:
    address: int
    size: int
    stream: int
    requested: int
    call_site: str


def _device_reading(document: Mapping[str, Any], device: int, raw: Sequence[Mapping[str, Any]]) -> AllocatorReading:
    """The allocator of one device: state, settings, history, refused request and call sites."""
    live: list[_LiveBlock] = []
    segments = [_read_segment(each, live) for each in sorted(raw, key=lambda each: _checked_size(each["address"]))]
    settings = _allocator_settings(document.get("allocator_settings"), segments)
    private = [segment for segment in segments if segment.pool]
    state = AllocatorState(
        allocated_bytes=sum(block.size for block in live),
        reserved_bytes=sum(segment.size_bytes for segment in segments),
        inactive_split_bytes=sum(s.size_bytes - s.allocated_bytes for s in segments if s.allocated_bytes),
        largest_free_bytes=max((s.largest_free_bytes for s in segments if not s.pool), default=0),
        private_pool_bytes=sum(segment.size_bytes for segment in private),
        private_free_bytes=sum(segment.size_bytes - segment.allocated_bytes for segment in private),
        settings=settings.as_text() or None,
        has_expandable_segments=settings.expandable_segments,
        segments=tuple(segments),
    )
    traces = document.get("device_traces") or []
    trace = traces[device] if isinstance(traces, list) and device < len(traces) else []
    history, refused = _allocator_history(trace, live, state, settings)
    return AllocatorReading(
        "memory snapshot",
        str(device),
        state,
        settings,
        requested_bytes=sum(block.requested for block in live),
        history=history,
        refused=refused,
        sites=_call_sites(live),
        card_free_bytes=refused.card_free_bytes if refused else None,
    )


def _read_segment(segment: Mapping[str, Any], in_use: list[_LiveBlock]) -> AllocatorSegment:
    """A segment with its blocks; those in use are also appended to `in_use`."""
    blocks, free = [], 0
    address, stream = _checked_size(segment["address"]), _checked_size(segment.get("stream", 0))
    for block in _checked_entries(segment["blocks"]):
        size = _checked_size(block["size"])
        state: Any = _STATES.get(_text_or_empty(block.get("state")), "free")
        blocks.append(SegmentBlock(size, state))
        if state == "free":
            free = max(free, size)
        else:
            requested = _checked_size(block.get("requested_size", size))
            where = _checked_size(block.get("address", address))
            in_use.append(_LiveBlock(where, size, stream, min(requested, size), _call_site_name(block.get("frames"))))
        address += size
    pool = segment.get("segment_pool_id", _COMMON_POOL)
    pool = tuple(_checked_size(part) for part in pool[:2]) if isinstance(pool, list | tuple) else _COMMON_POOL
    used = sum(block.size_bytes for block in blocks if block.state != "free")
    name = "" if pool == _COMMON_POOL else ".".join(map(str, pool))
    is_small, is_expandable = segment.get("segment_type") == "small", bool(segment.get("is_expandable", False))
    sizes = (_checked_size(segment["total_size"]), used, free)
    return AllocatorSegment(*sizes, name, is_small, is_expandable, tuple(blocks))


def _allocator_settings(raw: Any, segments: Sequence[AllocatorSegment]) -> AllocatorSettings:
    """The settings recorded in `raw`; if it lacks expandable segments, they are on if any segment is expandable."""
    values = raw if isinstance(raw, dict) else {}
    split = values.get("max_split_size", -1)
    divisions = values.get("roundup_power2_divisions")
    steps = {value for value in divisions.values() if isinstance(value, int)} if isinstance(divisions, dict) else set()
    return AllocatorSettings(
        bool(values.get("expandable_segments", any(segment.is_expandable for segment in segments))),
        split if isinstance(split, int) and 0 < split < 1 << 60 else None,
        min(steps.pop(), 64) if len(steps) == 1 else 0,
    )


def _allocator_history(
    trace: Any, live: Sequence[_LiveBlock], state: AllocatorState, settings: AllocatorSettings
) -> tuple[AllocatorHistory | None, RefusedRequest | None]:
    """(The recorded trace as a history, its last request refused for lack of memory); each None where missing."""
    raw = list(_checked_entries(trace))
    if not raw:
        return None, None
    events: list[AllocatorEvent] = []
    first: dict[int, tuple[int, int, int]] = {}
    allocated: set[int] = set()
    change = peak = 0
    refused: tuple[int, int | None, int] | None = None
    for index, entry in enumerate(raw):
        action = entry.get("action")
        size, stream, address = (_checked_size(entry.get(name, 0)) for name in ("size", "stream", "addr"))
        if action == "alloc":
            allocated.add(address)
            events.append(AllocatorEvent("allocate", address, size, stream))
        elif action == "free_completed":
            if address not in allocated:
                first[address] = (address, size, stream)
            allocated.discard(address)
            events.append(AllocatorEvent("free", address, size, stream))
        elif action in _GAINED:
            change += size
            peak = max(peak, change)
        elif action in _GIVEN_BACK:
            change -= size
            if _released_all_free(raw, index, settings):
                events.append(AllocatorEvent("empty_cache"))
        elif action == "oom":
            free = entry.get("device_free")
            refused = (size, free if isinstance(free, int) else None, change)
            events.append(AllocatorEvent("oom", 0, size, stream))
    for block in live:
        if block.address not in allocated:
            first[block.address] = (block.address, block.requested, block.stream)
    start = state.reserved_bytes - change
    history = AllocatorHistory(tuple(sorted(first.values())), tuple(events))
    if refused is None:
        return history, None
    size, free, change_then = refused
    return history, RefusedRequest(size, start + change_then, free, start + max(peak, 0))


def _released_all_free(raw: Sequence[Mapping[str, Any]], index: int, settings: AllocatorSettings) -> bool:
    """Whether the segment released at `index` of the trace begins an `empty_cache`, not one for max_split_size_mb."""
    if index and raw[index - 1].get("action") in _GIVEN_BACK:
        return False  # recorded at the first of them
    if settings.max_split_bytes is None:
        return True
    following = next((entry.get("action") for entry in raw[index:] if entry.get("action") not in _GIVEN_BACK), None)
    return following not in {*_GAINED, "oom"}


def _call_site_name(frames: Any) -> str:
    """`file:line function` of the innermost Python frame, outside torch if any is; empty without Python frames."""
    if not isinstance(frames, list | tuple):
        return ""
    python = [
        (file, frame)
        for frame in frames[:_MAX_FRAMES]
        if isinstance(frame, dict) and (file := _text_or_empty(frame.get("filename")))[-3:] == ".py"
    ]
    if not python:
        return ""
    file, frame = next((pair for pair in python if "/torch/" not in pair[0]), python[0])
    _, packages, path = file.rpartition("site-packages/")
    short = path if packages else "/".join(path.split("/")[-4:])
    line = frame.get("line")
    number = line if isinstance(line, int) else 0
    return f"{short[-120:]}:{number} {_text_or_empty(frame.get('name'))[:60]}".rstrip()


def _call_sites(live: Sequence[_LiveBlock]) -> tuple[CallSite, ...]:
    """Bytes and blocks in use by call site, the most bytes first; blocks without a known call site are left out."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for block in live:
        total = totals[block.call_site]
        total[0] += block.size
        total[1] += 1
    sites = [CallSite(place, size, count) for place, (size, count) in totals.items() if place]
    return tuple(sorted(sites, key=lambda site: -site.bytes))
