"""The dashboard's rows on vLLM's own metrics: expressions, units, levels, and what each panel means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.exports.grafana.panels import (
    BY_INSTANCE,
    BY_SERVER,
    INSTANCE,
    SELECTOR,
    WINDOW,
    DashboardRow,
    Panel,
    Query,
    percentiles,
    pool_levels,
    target_level,
)
from legroom.exports.grafana.pool_rows import kv_row, memory_row, preemptions_row, prefix_row
from legroom.exports.prometheus.promql import Measures, grouped

if TYPE_CHECKING:
    from legroom.exports.prometheus.levels import AlertLevels
    from legroom.facts.releases import Release
    from legroom.planning.plan_document import PlanDocument


def vllm_rows(release: Release | None, levels: AlertLevels, plan: PlanDocument | None) -> tuple[DashboardRow, ...]:
    measures = Measures(release, SELECTOR, BY_SERVER)
    rows = [_overview(measures, levels)]
    rows.append(memory_row(release, measures, plan))
    rows += [
        kv_row(measures, levels),
        _queue(measures, levels, plan),
        _throughput(measures),
        _latency(measures, levels),
    ]
    if measures.has("preemptions"):
        rows.append(preemptions_row(measures, levels, plan))
    if measures.has("prefix_hits") or measures.has("prefix_hit_rate"):
        rows.append(prefix_row(measures))
    return tuple(rows)


def _overview(measures: Measures, levels: AlertLevels) -> DashboardRow:
    window = levels.time(levels.rate_window_s)
    kv, waiting = measures.peak("kv_use", window, "max"), measures.queued()
    tokens = measures.rate("generation_tokens", WINDOW)
    ttft = measures.quantile("ttft", 0.99, WINDOW)
    stats = (
        Panel(
            "KV cache in use",
            f"The fullest pool of the chosen servers within {window}: between two requests it is emptier. Full alone "
            "is healthy: look at the queue next to it.",
            (Query(f"max({kv})", "fullest"),),
            "percentunit",
            "stat",
            6,
            pool_levels(levels),
            1.0,
        ),
        Panel(
            "Waiting for room",
            "Requests that wait for blocks or for a place in the batch, on all chosen servers.",
            (Query(f"sum({waiting})", "waiting"),),
            "short",
            "stat",
            6,
            ((levels.detect.queue_least, "orange"),),
        ),
        Panel(
            "Generated",
            "Tokens per second that the chosen servers generate together.",
            (Query(f"sum({tokens})", "tokens/s"),),
            "short",
            "stat",
            6,
        ),
        Panel(
            "Slowest first token",
            "The 99th percentile of the time to the first token, on the slowest chosen server.",
            (Query(f"max({ttft})", "p99"),),
            "s",
            "stat",
            6,
            target_level(levels.ttft_p99_s),
        ),
    )
    return DashboardRow("Overview", stats)


def _queue(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> DashboardRow:
    batch = ((float(plan.args["max_num_seqs"] * plan.engines), "orange"),) if plan else ()
    limit = f" The line is --max-num-seqs {plan.args['max_num_seqs']}{_times(plan)}." if plan else ""
    panels = [
        Panel(
            "Running",
            f"Requests in the batch.{limit}",
            (Query(measures.value("running")),),
            "short",
            "timeseries",
            8,
            batch,
        ),
        Panel(
            "Waiting",
            "Requests that wait for blocks or for a place in the batch.",
            (Query(measures.queued()),),
            "short",
            "timeseries",
            8,
            ((levels.detect.queue_least, "orange"),),
        ),
    ]
    if measures.has("queue_time"):
        panels.append(
            Panel(
                "Time in the queue",
                "From arrival to the first step, as percentiles over all requests of a server.",
                percentiles(measures, "queue_time"),
                "s",
                "timeseries",
                8,
            )
        )
    if measures.has("admission_rejections"):
        panels.append(_refused(measures))
    return DashboardRow("Queue", tuple(panels))


def _refused(measures: Measures) -> Panel:
    # One series a reason, none before the first refusal: shown as nothing refused.
    by_instance = Measures(measures.release, INSTANCE, BY_INSTANCE)
    refused = grouped(by_instance.rate("admission_rejections", WINDOW))
    nothing = f"0 * sum {BY_INSTANCE} (up{{{INSTANCE}}})"
    return Panel(
        "Refused by vLLM",
        "Requests per second that --max-num-queued-reqs or --max-num-queued-tokens refused.",
        (Query(f"{refused}\nor\n{nothing}", "{{instance}}"),),
        "reqps",
        "timeseries",
        24,
    )


def _times(plan: PlanDocument) -> str:
    return f" on each of {plan.engines} data-parallel engines" if plan.engines > 1 else ""


def _throughput(measures: Measures) -> DashboardRow:
    return DashboardRow(
        "Throughput",
        (
            Panel(
                "Prompt tokens",
                "Prompt tokens per second, cached ones included.",
                (Query(measures.rate("prompt_tokens", WINDOW)),),
                "short",
                "timeseries",
                8,
            ),
            Panel(
                "Generated tokens",
                "Tokens per second.",
                (Query(measures.rate("generation_tokens", WINDOW)),),
                "short",
                "timeseries",
                8,
            ),
            Panel(
                "Finished requests",
                "Requests per second that ended, for whatever reason.",
                (Query(measures.finished_rate(WINDOW)),),
                "reqps",
                "timeseries",
                8,
            ),
        ),
    )


def _latency(measures: Measures, levels: AlertLevels) -> DashboardRow:
    return DashboardRow(
        "Latency",
        (
            Panel(
                "Time to first token",
                "Queue, prefill and the first step.",
                percentiles(measures, "ttft"),
                "s",
                "timeseries",
                8,
                target_level(levels.ttft_p99_s),
            ),
            Panel(
                "Time between tokens",
                "How smoothly answers stream. A preemption shows as a long gap.",
                percentiles(measures, "inter_token"),
                "s",
                "timeseries",
                8,
                target_level(levels.inter_token_p99_s),
            ),
            Panel(
                "Whole request",
                "From arrival to the last token.",
                percentiles(measures, "e2e_latency"),
                "s",
                "timeseries",
                8,
            ),
        ),
    )
