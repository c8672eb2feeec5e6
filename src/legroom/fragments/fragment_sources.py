"""Readers of allocator state: memory snapshots, black boxes, `memory_summary()` text, a server's metrics."""

import asyncio
import re
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.black_box import AllocatorState, BlackBox, is_record, parse_record
from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.log_messages import size_bytes
from legroom.fragments.fragment_report import AllocatorReading, KvSlots
from legroom.fragments.torch_snapshot import MAX_FILE_BYTES, MAX_MADE_BYTES, is_pickle, read_snapshot
from legroom.memory.allocator_replay import RefusedRequest
from legroom.memory.caching_allocator import AllocatorSettings, parse_allocator_settings
from legroom.units import human_bytes

if TYPE_CHECKING:
    from legroom.live.metrics.sample import Sample

_HINT = "give a torch memory snapshot, a black box, memory_summary() text or a server's address"


def read_source(source: str) -> tuple[AllocatorReading, ...]:
    """The readings of a file or server address, one per device, the fullest first; LegroomError where it has none."""
    if source.startswith(("http://", "https://")):
        return read_server(source)
    return readings_of_content(_read_file(Path(source)), source)


def readings_of_content(
    content: bytes, name: str, max_made_bytes: int = MAX_MADE_BYTES
) -> tuple[AllocatorReading, ...]:
    """The readings in a black box, torch snapshot or memory summary called `name`; LegroomError for other bytes, or a
    snapshot that unpickles to more than `max_made_bytes`."""
    if is_pickle(content[:2]):
        return read_snapshot(content, max_made_bytes)
    if is_record(content[:200]):
        return (black_box_reading(parse_record(content, name)),)
    text = content.decode("utf-8", "replace")
    if _HEADING in text:
        return (read_summary(text),)
    if content[:2] == b"PK":
        raise LegroomError(f"{name} is a zip archive, not a memory snapshot", "torch.save was used: " + _HINT)
    raise LegroomError(f"{name} is nothing that tells of an allocator's memory", _HINT)


def _read_file(path: Path) -> bytes:
    """The bytes of a file; LegroomError where it cannot be read or is larger than any snapshot that legroom reads."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise LegroomError(
                f"{path} has {human_bytes(size)}; legroom reads snapshots of up to {human_bytes(MAX_FILE_BYTES)}",
                "record a shorter history: torch.cuda.memory._record_memory_history(max_entries=100000)",
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LegroomError(f"could not read {path}: {error.strerror}", _HINT) from error
    if len(content) > MAX_FILE_BYTES:
        raise LegroomError(f"{path} goes on beyond {human_bytes(MAX_FILE_BYTES)}", _HINT)
    return content


def black_box_reading(record: BlackBox) -> AllocatorReading:
    """The allocator's state in a worker's black box; LegroomError where it recorded none."""
    state = record.allocator
    if state is None:
        raise LegroomError("the black box has no allocator's state", "its worker ran without a GPU")
    free = record.card.free_bytes if record.card else None
    refused = None
    if record.request is not None and record.request.wanted_bytes:
        refused = RefusedRequest(record.request.wanted_bytes, state.reserved_bytes, free, state.reserved_bytes)
    non_torch = [reading.non_torch_bytes for reading in record.history if reading.non_torch_bytes is not None]
    return AllocatorReading(
        "black box",
        record.card.gpu if record.card else "0",
        state,
        parse_allocator_settings(state.settings or ""),
        refused=refused,
        non_torch_bytes=record.non_torch_bytes,
        non_torch_growth_bytes=non_torch[-1] - non_torch[0] if len(non_torch) > 1 else None,
        card_free_bytes=free,
        others_bytes=record.card.others_bytes if record.card else None,
    )


_HEADING = "memory summary, device ID"
_DEVICE = re.compile(r"memory summary, device ID ([0-9]{1,4})")
_COUNTS = re.compile(r"CUDA OOMs: ([0-9]{1,12}) *\| *cudaMalloc retries: ([0-9]{1,12})")
_ROW = re.compile(
    r"^\|\s*(Allocated memory|Active memory|Requested memory|GPU reserved memory|Non-releasable memory)\s*"
    r"\|\s*([0-9]{1,9}\s*(?:[KMGT]i?)?B)\s*\|\s*([0-9]{1,9}\s*(?:[KMGT]i?)?B)",
    re.MULTILINE,
)


def read_summary(text: str) -> AllocatorReading:
    """The state in the last `torch.cuda.memory_summary()` of a text; LegroomError if it is cut short."""
    text = text[text.rfind(_HEADING) :]
    # Before 2.0 torch wrote MB and meant MiB, as `size_bytes` reads it.
    rows = {name: (size_bytes(now), size_bytes(most)) for name, now, most in _ROW.findall(text)}
    if "Allocated memory" not in rows or "GPU reserved memory" not in rows:
        raise LegroomError("the memory summary lacks its rows of allocated and reserved memory", "give the whole table")
    device, counts = _DEVICE.search(text), _COUNTS.search(text)
    allocated, reserved = rows["Allocated memory"], rows["GPU reserved memory"]
    active, split = (rows.get(name, (None,))[0] for name in ("Active memory", "Non-releasable memory"))
    ooms, retries = (int(counts.group(number)) if counts else None for number in (1, 2))
    sizes = (allocated[0], reserved[0], active, split)
    state = AllocatorState(*sizes, peak_allocated_bytes=allocated[1], ooms=ooms, alloc_retries=retries)
    requested = rows.get("Requested memory", (None,))[0]
    name = device.group(1) if device else "0"
    return AllocatorReading("memory_summary() text", name, state, AllocatorSettings(), requested_bytes=requested)


_GAUGE = re.compile(r"^legroom_worker_([a-z_]{1,40})\{([^}\n]{0,300})\} ([0-9.eE+]{1,30})", re.MULTILINE)
_STATE_GAUGES = (
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "largest_free_bytes"),
    *("graph_pool_bytes", "peak_allocated_bytes"),
)
_LABEL = re.compile(r'(rank|gpu)="([^"]{0,60})"')


def read_server(address: str) -> tuple[AllocatorReading, ...]:
    """Scrapes a running server: the memory of its workers, the fullest first; LegroomError where its page has none."""
    from legroom.live.metrics.endpoint import endpoint
    from legroom.live.metrics.exposition import parse_sample
    from legroom.live.metrics.scrape import TIMEOUT_S, fetch, open_session

    target = endpoint(address)

    async def page() -> bytes:
        """The body of the server's /metrics page."""
        async with open_session() as session:
            return await fetch(session, target, TIMEOUT_S)

    body = asyncio.run(page())
    return readings_of_metrics(body.decode("utf-8", "replace"), parse_sample(body, time.time(), target.server))


def readings_of_metrics(text: str, sample: "Sample") -> tuple[AllocatorReading, ...]:
    """Each worker's allocator by legroom's gauges on a /metrics page (`sample`: as parsed); or LegroomError."""
    workers: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for name, labels, value in _GAUGE.findall(text):
        named = dict(_LABEL.findall(labels))
        with suppress(ValueError, OverflowError):  # a gauge of no worker
            workers[named.get("gpu", ""), named.get("rank", "")][name] = int(float(value))
    kv = _kv_slots(sample)
    readings = [
        AllocatorReading(
            "server",
            gpu,
            AllocatorState(**{name: gauges[name] for name in _STATE_GAUGES if name in gauges}),
            AllocatorSettings(),
            non_torch_bytes=gauges.get("non_torch_bytes"),
            kv=kv,
        )
        for (gpu, _), gauges in workers.items()
        if "reserved_bytes" in gauges and "allocated_bytes" in gauges
    ]
    for (gpu, _), gauges in workers.items():
        if gpu == "cpu" and (rss_bytes := gauges.get("host_rss_bytes")) is not None:
            state = AllocatorState(rss_bytes, rss_bytes)
            readings.append(AllocatorReading("server", gpu, state, AllocatorSettings(), kv=kv, is_host=True))
    if not readings:
        hint = "start vLLM with LEGROOM_WORKER_MEMORY=1 where legroom is installed beside it"
        raise LegroomError("the server's page does not show its workers' memory", hint, UNREACHABLE)
    return tuple(sorted(readings, key=lambda reading: -reading.state.reserved_bytes))


def _kv_slots(sample: "Sample") -> KvSlots | None:
    """Running requests and KV blocks of all engines together; None where the sample lacks them."""
    engines = [engine for engine in sample.engines if engine.num_blocks and engine.block_size]
    if not engines or any(engine.running is None for engine in engines):
        return None
    blocks = sum(engine.num_blocks or 0 for engine in engines)
    return KvSlots(round(sample.running or 0), blocks, engines[0].block_size or 1)
