"""A server's metrics page with legroom's worker plugin: one reading a worker's GPU."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from legroom.black_box import AllocatorState
from legroom.errors import UNREACHABLE, LegroomError
from legroom.fragments.reading import AllocatorReading, KvSlots
from legroom.memory.caching_allocator import AllocatorSettings

if TYPE_CHECKING:
    from legroom.live.metrics.sample import Sample

_GAUGE = re.compile(r"^legroom_worker_([a-z_]{1,40})\{([^}\n]{0,300})\} ([0-9.eE+]{1,30})", re.MULTILINE)
_LABEL = re.compile(r'(rank|gpu)="([^"]{0,60})"')


def read_server(address: str) -> tuple[AllocatorReading, ...]:
    """From a running server; the fullest GPU first."""
    from legroom.live.metrics.exposition import parse_sample
    from legroom.live.metrics.scrape import TIMEOUT_S, endpoint, fetch, open_session

    target = endpoint(address)

    async def page() -> bytes:
        async with open_session() as session:
            return await fetch(session, target, TIMEOUT_S)

    body = asyncio.run(page())
    return read_page(body.decode("utf-8", "replace"), parse_sample(body, time.time(), target.server))


def read_page(text: str, sample: Sample) -> tuple[AllocatorReading, ...]:
    workers: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, labels, value in _GAUGE.findall(text):
        named = dict(_LABEL.findall(labels))
        workers[named.get("gpu", ""), named.get("rank", "")][name] = int(float(value))
    kv = _slots(sample)
    readings = [
        AllocatorReading(
            "server",
            gpu,
            AllocatorState(
                gauges["allocated_bytes"],
                gauges["reserved_bytes"],
                active_bytes=gauges.get("active_bytes"),
                inactive_split_bytes=gauges.get("inactive_split_bytes"),
                largest_free_bytes=gauges.get("largest_free_bytes"),
                graph_pool_bytes=gauges.get("graph_pool_bytes"),
                peak_allocated_bytes=gauges.get("peak_allocated_bytes"),
            ),
            AllocatorSettings(),
            non_torch_bytes=gauges.get("non_torch_bytes"),
            kv=kv,
        )
        for (gpu, _), gauges in workers.items()
        if "reserved_bytes" in gauges and "allocated_bytes" in gauges
    ]
    readings += [_host_reading(gauges["host_rss_bytes"], kv) for gauges in _without_gpu(workers)]
    if not readings:
        raise LegroomError(
            "the server's page does not show its workers' memory",
            "start vLLM with LEGROOM_WORKER_MEMORY=1 where legroom is installed beside it",
            UNREACHABLE,
        )
    return tuple(sorted(readings, key=lambda reading: -reading.state.reserved_bytes))


def _without_gpu(workers: Mapping[tuple[str, str], dict[str, int]]) -> Iterator[dict[str, int]]:
    return (gauges for (gpu, _), gauges in workers.items() if gpu == "cpu" and "host_rss_bytes" in gauges)


def _host_reading(rss_bytes: int, kv: KvSlots | None) -> AllocatorReading:
    state = AllocatorState(rss_bytes, rss_bytes)
    return AllocatorReading("server", "cpu", state, AllocatorSettings(), kv=kv, is_host=True)


def _slots(sample: Sample) -> KvSlots | None:
    engines = [engine for engine in sample.engines if engine.num_blocks and engine.block_size]
    if not engines or any(engine.running is None for engine in engines):
        return None
    blocks = sum(engine.num_blocks or 0 for engine in engines)
    used = sum(round((engine.kv_use or 0.0) * (engine.num_blocks or 0)) for engine in engines)
    return KvSlots(round(sample.running or 0), blocks, engines[0].block_size or 1, used)
