"""Which series are read, under every name and spelling that a release or a collector ever gave them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from legroom.facts import metrics

_GAUGES = {
    "kv_use": "kv_use",
    "running": "running",
    "waiting": "waiting",
    "swapped": "swapped",
    "prefix_hit_rate": "prefix_hit_rate",
}
_COUNTERS = {
    "preemptions": "preemptions",
    "prefix_queries": "prefix_queries",
    "prefix_hits": "prefix_hits",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prompt_tokens_cached": "cached_tokens",
    "prompt_tokens_recomputed": "recomputed_tokens",
}
HISTOGRAMS = {
    "ttft": "ttft",
    "inter_token": "inter_token",
    "e2e_latency": "e2e_latency",
    "queue_time": "queue_time",
    "request_prompt_tokens": "request_prompt_tokens",
}
WORKER = {
    "legroom_worker_allocated_bytes": "allocated_bytes",
    "legroom_worker_reserved_bytes": "reserved_bytes",
    "legroom_worker_used_bytes": "memory_used_bytes",
    "legroom_worker_host_rss_bytes": "host_rss_bytes",
    "legroom_worker_others_bytes": "others_bytes",
    "legroom_worker_alloc_retries": "alloc_retries",
}
"""What a telemetry plugin inside vLLM's workers exposes, one series a GPU or worker."""
API_SERVER_RSS = "process_resident_memory_bytes"
"""What prometheus_client itself shows of the process that serves the page, where that page is of one process."""
STOPPED_ENGINES = "legroom_guard_stopped_engines"
"""What a guard inside of vLLM sees of the engine's processes."""
_PREFIXES = ("vllm:", "vllm_", "ray_vllm_", "ray_vllm:")
"""Ray and some collectors rewrite the colon; the measures are the same."""
_ANY_NUMBER = frozenset({b"gauge", b"counter", b"untyped", b"unknown", b"info"})
_HISTOGRAM = frozenset({b"histogram", b"untyped", b"unknown"})


class Slot(NamedTuple):
    """Where a series belongs."""

    field: str
    rank: int
    """0 for the newest name of its role."""
    part: str
    """`value`, or `bucket`, `sum`, `count` of a histogram, or what else is read in its own way."""
    types: frozenset[bytes]
    """Types that a `# TYPE` line may give it."""


@cache
def slots_by_name() -> dict[bytes, Slot]:
    """Series name -> slot, for every name a role ever had, spelled in every way it is met."""
    slots: dict[bytes, Slot] = {
        b"process_start_time_seconds": Slot("process_start_s", 0, "server", _ANY_NUMBER),
        API_SERVER_RSS.encode(): Slot("api_server_rss_bytes", 0, "server", _ANY_NUMBER),
        STOPPED_ENGINES.encode(): Slot("stopped_engines", 0, "server", _ANY_NUMBER),
    }
    for name, field in WORKER.items():
        slots[name.encode()] = Slot(field, 0, "worker", _ANY_NUMBER)
    special = {
        "request_success": "success",
        "cache_config": "config",
        "sleep_state": "sleep",
        "admission_rejections": "rejections",
        "waiting_by_reason": "reason",
    }
    fields = {**_GAUGES, **_COUNTERS, **HISTOGRAMS, **{role: role for role in special}}
    for role, field in fields.items():
        for rank, series in enumerate(metrics.names_of(role)):
            for name in _spellings(series):
                if role in HISTOGRAMS:
                    for part in ("bucket", "sum", "count"):
                        slots.setdefault(f"{name}_{part}".encode(), Slot(field, rank, part, _HISTOGRAM))
                else:
                    slots.setdefault(name.encode(), Slot(field, rank, special.get(role, "value"), _ANY_NUMBER))
    return slots


def _spellings(series: str) -> Iterable[str]:
    bare = series.removeprefix("vllm:")
    for prefix in _PREFIXES:
        yield prefix + bare
        if bare.endswith("_total"):
            yield prefix + bare.removesuffix("_total")
