"""Recording rules: vLLM's measures under one name each, whatever the release calls them. The alerts read these.

A name begins with the level that it is kept at, as Prometheus advises: `engine:` has one series for each engine of a
server, `instance:` one for each server, `model:` one for each model of a job, namespace and cluster.
"""

from __future__ import annotations

from legroom.exports.prometheus.alert_levels import AlertLevels
from legroom.exports.prometheus.measures import Measures, first_with_value, in_parens

KV_USE = "engine:legroom_vllm_kv_use:ratio"
RUNNING = "engine:legroom_vllm_running:count"
WAITING = "engine:legroom_vllm_waiting:count"
QUEUED = "engine:legroom_vllm_queued:count"
PREEMPTIONS = "engine:legroom_vllm_preemptions:rate"
FAILED = "engine:legroom_vllm_failed:rate"
FINISHED = "engine:legroom_vllm_finished:rate"
FINISHED_COUNT = "engine:legroom_vllm_finished:count"
PROMPT_TOKENS = "engine:legroom_vllm_prompt_tokens:rate"
GENERATION_TOKENS = "engine:legroom_vllm_generation_tokens:rate"
PROGRESS = "engine:legroom_vllm_progress:rate"
PREFIX_HITS = "engine:legroom_vllm_prefix_hit:ratio"
RECOMPUTED = "engine:legroom_vllm_recomputed:ratio"
SERVER_ERRORS = "instance:legroom_vllm_server_errors:rate"
RESTARTS = "instance:legroom_vllm_restarts:count"
MODEL_RUNNING = "model:legroom_vllm_running:sum"
_MODEL = "cluster, namespace, job, model_name"
_MODEL_LEVEL = {
    "model:legroom_vllm_kv_use:avg": f"avg by ({_MODEL}) ({KV_USE})",
    MODEL_RUNNING: f"sum by ({_MODEL}) ({RUNNING})",
    "model:legroom_vllm_queued:sum": f"sum by ({_MODEL}) ({QUEUED})",
    "model:legroom_vllm_generation_tokens:rate": f"sum by ({_MODEL}) ({GENERATION_TOKENS})",
}
"""Aggregates over the servers of a model."""
_LATENCIES = {"ttft": "ttft", "inter_token": "inter_token", "e2e_latency": "e2e", "queue_time": "queue_time"}
BY_INSTANCE = "by (cluster, namespace, job, instance)"


def latency_series(role: str, share: str) -> str:
    """The recorded series of a latency's percentile."""
    return f"engine:legroom_vllm_{_LATENCIES[role]}_seconds:{share}"


def observation_series(role: str) -> str:
    """The recorded series of a latency's number of observations."""
    return f"engine:legroom_vllm_{_LATENCIES[role]}:count"


def recorded_expressions(measures: Measures, levels: AlertLevels, job: str) -> dict[str, str]:
    """The expressions of all recorded series that the release has metrics for, by name."""
    window = levels.time(levels.rate_window_s)
    records = {
        KV_USE: measures.value("kv_use", "max"),
        RUNNING: measures.value("running"),
        WAITING: measures.value("waiting"),
        QUEUED: measures.queued(),
        **_rate_expressions(measures, levels, window),
    }
    if measures.has("prefix_hits") or measures.has("prefix_hit_rate"):
        records[PREFIX_HITS] = measures.prefix_hit_ratio(window)
    over = levels.time(levels.latency_window_s)
    for role in filter(measures.has, _LATENCIES):
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            records[latency_series(role, name)] = measures.quantile(role, share, over)
        records[observation_series(role)] = measures.observed(role, over)
    records[RESTARTS] = restarts_query(measures, levels.time(levels.crash_window_s), job)
    # vLLM counts HTTP 5xx even when its engine is dead.
    records[SERVER_ERRORS] = f'sum {BY_INSTANCE} (rate(http_requests_total{{job="{job}", status=~"5.*"}}[{window}]))'
    return records | _MODEL_LEVEL


def _rate_expressions(measures: Measures, levels: AlertLevels, window: str) -> dict[str, str]:
    """Recording rule names with their PromQL: rates that the release's metrics allow."""
    records = {}
    if measures.has("preemptions"):
        records[PREEMPTIONS] = measures.rate("preemptions", window)
    records[FINISHED] = measures.finished_rate(window)
    if measures.has("request_success"):
        records[FAILED] = measures.failed_rate(window)
    prompts, outputs = (measures.rate(role, window) for role in ("prompt_tokens", "generation_tokens"))
    records[FINISHED_COUNT] = measures.finished_count(levels.time(levels.detect.no_traffic_s))
    records[PROMPT_TOKENS] = prompts
    records[GENERATION_TOKENS] = outputs
    records[PROGRESS] = f"{in_parens(prompts)}\n+\n{in_parens(outputs)}"
    if measures.has("prompt_tokens_recomputed"):
        again = measures.rate("prompt_tokens_recomputed", window)
        records[RECOMPUTED] = f"{in_parens(again)}\n/\n({in_parens(prompts)} > 0)"
    return records


def restarts_query(measures: Measures, window: str, job: str) -> str:
    """PromQL of a server's restarts within a window: changes of the process start time, else counter resets.

    The start time is missing with several API servers and with V0's separate engine process. The counter is that of
    prompt tokens, because an embedder generates none.
    """
    by_instance = Measures(measures.release, measures.selector, BY_INSTANCE)
    return first_with_value(
        f'max {BY_INSTANCE} (changes(process_start_time_seconds{{job="{job}"}}[{window}]))',
        by_instance.resets("prompt_tokens", window),
        _replaced_pods_query(window, job),
    )


def _replaced_pods_query(window: str, job: str) -> str:
    """PromQL of how often a pod was recreated under its name, with a new address; its servers differ in the port alone.
    A LeaderWorkerSet recreates all of its pods when one ends."""
    by_pod = "by (cluster, namespace, job, pod)"
    seen = f'count_over_time(up{{job="{job}", pod!=""}}[{window}])'
    host = f'label_replace({seen}, "host", "$1", "instance", "(.+?)(?::[0-9]+)?")'
    addresses = f"count by (cluster, namespace, job, pod, host) ({host})"
    again = f"(count {by_pod} ({addresses}) > 1) - 1"
    return f'max {BY_INSTANCE} (label_replace({again}, "instance", "$1", "pod", "(.+)"))'
