"""A Sample back as series and values, under the newest release's names: what a recording keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from legroom.facts import metrics
from legroom.live.sample import EngineSample, Histogram, Sample

_PLAIN = {
    "kv_use": "kv_use", "running": "running", "waiting": "waiting", "swapped": "swapped",
    "preemptions": "preemptions", "prefix_queries": "prefix_queries", "prefix_hits": "prefix_hits",
    "prefix_hit_rate": "prefix_hit_rate", "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens", "prompt_tokens_cached": "cached_tokens",
    "prompt_tokens_recomputed": "recomputed_tokens",
}  # fmt: skip
_HISTOGRAMS = ("ttft", "inter_token", "e2e_latency", "queue_time", "request_prompt_tokens")
_SERVER = {"allocated_bytes": "legroom_worker_allocated_bytes", "reserved_bytes": "legroom_worker_reserved_bytes"}


def rendered(sample: Sample) -> Iterator[tuple[str, float]]:
    """Every series of a sample, with its value. GPU memory seen from outside is no series of the server's."""
    pools = Counter((engine.model, *_pool(engine).items()) for engine in sample.engines)
    for engine in sample.engines:
        yield from _engine(engine)
        if pool := _pool(engine):
            # As vLLM has it: every one of a server's data-parallel engines names the blocks of all together.
            if engine.num_blocks is not None:
                pool["num_gpu_blocks"] = str(engine.num_blocks * pools[engine.model, *pool.items()])
            yield _named("cache_config", _base(engine), **pool), 1.0
    if sample.rejections is not None:
        yield metrics.names_of("admission_rejections")[0] + '{reason="any"}', sample.rejections
    if sample.process_start_s is not None:
        yield "process_start_time_seconds", sample.process_start_s
    for field, name in _SERVER.items():
        value = getattr(sample, field)
        if value is not None:
            yield name, float(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _named(role: str, base: str, **extra: str) -> str:
    more = "".join(f",{name}={_quoted(value)}" for name, value in extra.items())
    return f"{metrics.names_of(role)[0]}{{{base}{more}}}"


def _base(engine: EngineSample) -> str:
    return f"engine={_quoted(engine.engine)},model_name={_quoted(engine.model)}"


def _engine(engine: EngineSample) -> Iterator[tuple[str, float]]:
    base = _base(engine)
    for role, field in _PLAIN.items():
        value = getattr(engine, field)
        if value is not None:
            yield _named(role, base), value
    if engine.waiting_for_capacity is not None:
        yield _named("waiting_by_reason", base, reason="capacity"), engine.waiting_for_capacity
    if engine.finished is not None:
        reasons = {"abort": engine.aborted, "error": engine.errored}
        known = {reason: value for reason, value in reasons.items() if value is not None}
        yield _named("request_success", base, finished_reason="stop"), engine.finished - sum(known.values())
        for reason, value in known.items():
            yield _named("request_success", base, finished_reason=reason), value
    if engine.asleep:
        yield _named("sleep_state", base, sleep_state="discard_all"), 1.0
    for field in _HISTOGRAMS:
        histogram = getattr(engine, field)
        if histogram is not None:
            yield from _histogram(metrics.names_of(field)[0], base, histogram)


def _pool(engine: EngineSample) -> dict[str, str]:
    values = {
        "num_gpu_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "kv_cache_size_tokens": engine.size_tokens,
        "kv_cache_max_concurrency": engine.max_concurrency,
        "enable_prefix_caching": engine.prefix_caching,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _histogram(name: str, base: str, histogram: Histogram) -> Iterator[tuple[str, float]]:
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        yield f'{name}_bucket{{{base},le="{bound}"}}', count
    yield f"{name}_sum{{{base}}}", histogram.sum
    yield f"{name}_count{{{base}}}", histogram.count
