"""Recording rules: vLLM's measures under one name each, whatever the release calls them. The alerts read these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.exports.prometheus.promql import Measures, either, grouped
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.exports.prometheus.levels import AlertLevels

KV_USE = "legroom:vllm_kv_use:ratio"
RUNNING = "legroom:vllm_running:count"
WAITING = "legroom:vllm_waiting:count"
QUEUED = "legroom:vllm_queued:count"
PREEMPTIONS = "legroom:vllm_preemptions:rate"
FINISHED = "legroom:vllm_finished:rate"
FINISHED_COUNT = "legroom:vllm_finished:count"
PROMPT_TOKENS = "legroom:vllm_prompt_tokens:rate"
GENERATION_TOKENS = "legroom:vllm_generation_tokens:rate"
PROGRESS = "legroom:vllm_progress:rate"
PREFIX_HITS = "legroom:vllm_prefix_hit:ratio"
RECOMPUTED = "legroom:vllm_recomputed:ratio"
RESTARTS = "legroom:vllm_restarts:count"
LATENCIES = {"ttft": "ttft", "inter_token": "inter_token", "e2e_latency": "e2e", "queue_time": "queue_time"}
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def latency(role: str, share: str) -> str:
    """The record of a latency's percentile."""
    return f"legroom:vllm_{LATENCIES[role]}_seconds:{share}"


def observed(role: str) -> str:
    """The record of how many observations are behind a latency's percentiles."""
    return f"legroom:vllm_{LATENCIES[role]}:count"


@dataclass(frozen=True)
class Recording:
    record: str
    expr: str


def recordings(measures: Measures, levels: AlertLevels, job: str) -> tuple[Recording, ...]:
    """Every rule that the release has the metrics for."""
    window = levels.time(levels.rate_window_s)
    records = [Recording(KV_USE, measures.value("kv_use", "max"))]
    records += [Recording(RUNNING, measures.value("running")), Recording(WAITING, measures.value("waiting"))]
    records.append(Recording(QUEUED, measures.queued()))
    records += _rates(measures, levels, window)
    if measures.has("prefix_hits") or measures.has("prefix_hit_rate"):
        records.append(Recording(PREFIX_HITS, measures.prefix_hit_ratio(window)))
    records += _latencies(measures, levels)
    records.append(Recording(RESTARTS, restarts(measures, levels.time(levels.detect.crash_over_s), job)))
    return tuple(records)


def _rates(measures: Measures, levels: AlertLevels, window: str) -> list[Recording]:
    records = []
    if measures.has("preemptions"):
        records.append(Recording(PREEMPTIONS, measures.rate("preemptions", window)))
    records += [
        Recording(FINISHED, measures.finished_rate(window)),
        Recording(FINISHED_COUNT, measures.finished_count(levels.time(levels.detect.no_traffic_s))),
        Recording(PROMPT_TOKENS, measures.rate("prompt_tokens", window)),
        Recording(GENERATION_TOKENS, measures.rate("generation_tokens", window)),
    ]
    both = (grouped(measures.rate(role, window)) for role in ("prompt_tokens", "generation_tokens"))
    records.append(Recording(PROGRESS, "\n+\n".join(both)))
    if measures.has("prompt_tokens_recomputed"):
        again, all_ = measures.rate("prompt_tokens_recomputed", window), measures.rate("prompt_tokens", window)
        records.append(Recording(RECOMPUTED, f"{grouped(again)}\n/\n({grouped(all_)} > 0)"))
    return records


def _latencies(measures: Measures, levels: AlertLevels) -> list[Recording]:
    window = levels.time(levels.latency_window_s)
    records = []
    for role in LATENCIES:
        if measures.has(role):
            records += [
                Recording(latency(role, name), measures.quantile(role, share, window)) for name, share in SHARES.items()
            ]
            records.append(Recording(observed(role), measures.observed(role, window)))
    return records


def restarts(measures: Measures, window: str, job: str) -> str:
    """Starts within a window: the process's own start time where it is shown (not with several API servers, nor by
    V0's separate engine process), else how often a counter began again. That of prompts: an embedder generates none."""
    by_instance = Measures(measures.release, measures.selector, "by (job, instance)")
    return either(
        f'max by (job, instance) (changes(process_start_time_seconds{{job="{job}"}}[{window}]))',
        by_instance.resets("prompt_tokens", window),
    )
