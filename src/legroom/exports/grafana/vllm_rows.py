"""The dashboard's rows of vLLM's own metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.exports.grafana.panels import (
    BY_ENGINE,
    BY_INSTANCE,
    BY_SERVER,
    INSTANCE,
    SELECTOR,
    SERVER,
    WINDOW,
    DashboardRow,
    Panel,
    percentiles,
    pool_levels,
    target_level,
)
from legroom.exports.prometheus.measures import Measures, grouped

if TYPE_CHECKING:
    from legroom.exports.prometheus.alert_levels import AlertLevels
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
            {"fullest": f"max({kv})"},
            unit="percentunit",
            kind="stat",
            width=6,
            levels=pool_levels(levels),
            max=1.0,
        ),
        Panel(
            "Waiting for room",
            "Requests that wait for blocks or for a place in the batch, on all chosen servers.",
            {"waiting": f"sum({waiting})"},
            kind="stat",
            width=6,
            levels=((levels.detect.queue_least, "orange"),),
        ),
        Panel(
            "Generated",
            "Tokens per second that the chosen servers generate together.",
            {"tokens/s": f"sum({tokens})"},
            kind="stat",
            width=6,
        ),
        Panel(
            "Slowest first token",
            "The 99th percentile of the time to the first token, on the slowest chosen server.",
            {"p99": f"max({ttft})"},
            unit="s",
            kind="stat",
            width=6,
            levels=target_level(levels.ttft_p99_s),
        ),
    )
    return DashboardRow("Overview", stats)


def _queue(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> DashboardRow:
    batch = ((float(plan.args["max_num_seqs"] * plan.engines), "orange"),) if plan else ()
    limit = f" The line is --max-num-seqs {plan.args['max_num_seqs']}{_times(plan)}." if plan else ""
    panels = [
        Panel("Running", f"Requests in the batch.{limit}", {SERVER: measures.value("running")}, width=8, levels=batch),
        Panel(
            "Waiting",
            "Requests that wait for blocks or for a place in the batch.",
            {SERVER: measures.queued()},
            width=8,
            levels=((levels.detect.queue_least, "orange"),),
        ),
    ]
    if measures.has("queue_time"):
        panels.append(
            Panel(
                "Time in the queue",
                "From arrival to the first step, as percentiles over all requests of a server.",
                percentiles(measures, "queue_time"),
                unit="s",
                width=8,
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
        {"{{instance}}": f"{refused}\nor\n{nothing}"},
        unit="reqps",
        width=24,
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
                {SERVER: measures.rate("prompt_tokens", WINDOW)},
                width=8,
            ),
            Panel(
                "Generated tokens", "Tokens per second.", {SERVER: measures.rate("generation_tokens", WINDOW)}, width=8
            ),
            Panel(
                "Finished requests",
                "Requests per second that ended, for whatever reason.",
                {SERVER: measures.finished_rate(WINDOW)},
                unit="reqps",
                width=8,
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
                unit="s",
                width=8,
                levels=target_level(levels.ttft_p99_s),
            ),
            Panel(
                "Time between tokens",
                "How smoothly answers stream. A preemption shows as a long gap.",
                percentiles(measures, "inter_token"),
                unit="s",
                width=8,
                levels=target_level(levels.inter_token_p99_s),
            ),
            Panel(
                "Whole request",
                "From arrival to the last token.",
                percentiles(measures, "e2e_latency"),
                unit="s",
                width=8,
            ),
        ),
    )


_SETTINGS = (
    "cluster",
    "namespace",
    "job",
    "instance",
    "engine",
    "num_gpu_blocks",
    "block_size",
    "cache_dtype",
    "gpu_memory_utilization",
)
"""The labels of vLLM's cache settings that the table shows."""
_PARTS = {
    "weights_bytes": "weights",
    "activation_bytes": "activations",
    "cuda_graph_bytes": "CUDA graphs",
    "non_torch_bytes": "outside PyTorch",
    "kv_cache_bytes": "KV cache",
    "outside_bytes": "beside the budget",
    "headroom_bytes": "left free",
}


def memory_row(release: Release | None, measures: Measures, plan: PlanDocument | None) -> DashboardRow:
    """The reported KV pool; with a plan, also its layout and pool."""
    # The settings are the labels of this metric: they are what is shown, not parts to add up.
    reported = Measures(release, INSTANCE, f"by ({', '.join(_SETTINGS)})")
    settings = Panel(
        "The pool as the servers report it",
        "num_gpu_blocks and block_size are the pool that vLLM allocated at start"
        + (
            f"; the plan says {plan.kv.num_blocks:,} blocks of {plan.kv.block_size} tokens."
            if plan
            else ". `legroom export grafana --plan FILE` puts the plan beside it."
        ),
        {"{{instance}}": reported.value("cache_config", "max")},
        kind="table",
        width=24 if plan is None else 8 if plan.kv.num_blocks else 12,
    )
    if plan is None:
        return DashboardRow("Memory", (settings,))
    return DashboardRow("Memory: the plan against reality", (_layout(plan), *_cached_tokens(measures, plan), settings))


def _layout(plan: PlanDocument) -> Panel:
    return Panel(
        "Planned layout of one GPU",
        f"Where every byte of the tightest GPU goes, by the plan for {plan.model} on "
        f"{plan.gpu.count} x {plan.gpu.name}.",
        {label: f"vector({size})" for name, label in _PARTS.items() if (size := getattr(plan.layout, name))},
        unit="bytes",
        kind="bargauge",
        width=8 if plan.kv.num_blocks else 12,
    )


def _cached_tokens(measures: Measures, plan: PlanDocument) -> tuple[Panel, ...]:
    """A panel of the tokens in the KV cache; none for a model without one."""
    tokens = pool_tokens(plan)
    if not tokens:
        return ()
    panel = Panel(
        "Tokens in the KV cache",
        f"KV use times the planned {_pools(plan)}. The line is the pool: "
        f"{plan.kv.max_concurrency * plan.engines:.1f} requests of {plan.args['max_model_len']:,} tokens.",
        {SERVER: f"{tokens} * {grouped(measures.value('kv_use', 'avg'))}", "planned pool": f"vector({tokens})"},
        width=8,
        levels=((tokens, "red"),),
    )
    return (panel,)


def pool_tokens(plan: PlanDocument) -> int:
    """The KV cache tokens of all data-parallel engines of a server."""
    return plan.kv.tokens * plan.engines


def _pools(plan: PlanDocument) -> str:
    pool = f"pool of {plan.kv.tokens:,} tokens"
    return pool if plan.engines == 1 else f"{plan.engines} pools, each a {pool}"


def pressure(measures: Measures, levels: AlertLevels) -> str:
    """PromQL of the requests that wait for a full pool, by the condition of the alert."""
    each, window = replace(measures, keep=BY_ENGINE), levels.time(levels.rate_window_s)
    kv, running = (grouped(each.peak(*what)) for what in (("kv_use", window, "max"), ("running", window)))
    queued = grouped(each.queued())
    full = f"({kv} >= bool {levels.detect.pool_full_ratio:g})"
    one_more = f"({kv} > bool 0.5) * ({kv} * (1 + 1 / {running}) > bool 1)"
    return f"sum {BY_SERVER} ({queued} * ({full} + {one_more} > bool 0))"


def kv_row(measures: Measures, levels: AlertLevels) -> DashboardRow:
    """The row of KV cache use and pressure."""
    return DashboardRow(
        "KV cache",
        (
            Panel(
                "KV cache in use",
                "Share of the pool's blocks that running requests hold. Cached blocks that nobody uses do "
                "not count in V1. A full pool without a queue is healthy.",
                {SERVER: measures.value("kv_use", "max")},
                unit="percentunit",
                levels=pool_levels(levels),
                max=1.0,
            ),
            Panel(
                "Pressure",
                f"Requests that wait while the pool is at least {levels.detect.pool_full_ratio:.0%} full, or has no "
                "room for one more like those that run: above zero, the pool is what they wait for.",
                {SERVER: pressure(measures, levels)},
                levels=((1, "red"),),
            ),
        ),
    )


def preemptions_row(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> DashboardRow:
    """The row of preemptions and recomputed tokens."""
    detect = levels.detect
    rate, finished = measures.rate("preemptions", WINDOW), measures.finished_rate(WINDOW)
    panels = [
        Panel(
            "Preemptions",
            "Requests per second that lost their blocks and will be computed again. The counter moves when "
            "the victim runs again.",
            {SERVER: rate},
            unit="reqps",
            width=8,
            levels=((detect.alert_preemptions_per_s, "red"),),
        ),
        Panel(
            "Preemptions per finished request",
            "How much work is done again for each request that gets done.",
            {SERVER: f"{grouped(rate)} / ({grouped(finished)} > 0)"},
            width=8,
            levels=((detect.preemptions_per_request, "red"),),
        ),
    ]
    share = recomputed_share(measures, plan)
    if share:
        panels.append(
            Panel(
                "Recomputed share",
                "Computed tokens that had been computed before. Counted by 0.16.0 to 0.19.1; else an "
                "upper bound: each preempted request held as much as a running one does on average.",
                {SERVER: share},
                unit="percentunit",
                width=8,
                levels=((detect.preemption_share_ratio, "red"),),
            )
        )
    return DashboardRow("Preemptions", tuple(panels))


def recomputed_share(measures: Measures, plan: PlanDocument | None) -> str:
    """PromQL of the share of recomputed tokens; empty without a counter and a pool size."""
    useful = (
        f"{grouped(measures.rate('prompt_tokens', WINDOW))} + {grouped(measures.rate('generation_tokens', WINDOW))}"
    )
    ways = []
    if measures.has("prompt_tokens_recomputed"):
        again = grouped(measures.rate("prompt_tokens_recomputed", WINDOW))
        ways.append(f"{again} / ({again} + {useful} > 0)")
    if plan is not None and pool_tokens(plan):
        use, running = grouped(measures.value("kv_use", "avg")), grouped(measures.value("running"))
        tokens_each = f"{pool_tokens(plan)} * {use} / ({running} > 0)"
        again = f"{grouped(measures.rate('preemptions', WINDOW))} * {tokens_each}"
        ways.append(f"{again} / ({again} + {useful} > 0)")
    return "\nor\n".join(ways)


def prefix_row(measures: Measures) -> DashboardRow:
    """The row of the prefix cache."""
    panels = [
        Panel(
            "Prefix cache hit rate",
            "Share of looked-up prompt tokens that were found. A low rate costs a little hashing and no "
            "memory: cached blocks are freed on demand.",
            {SERVER: measures.prefix_hit_ratio(WINDOW)},
            unit="percentunit",
            max=1.0,
        )
    ]
    if measures.has("prefix_hits"):
        panels.append(
            Panel(
                "Prefix cache look-ups",
                "Prompt tokens per second that were looked up and found (blocks before 0.9.0).",
                {
                    f"looked up {SERVER}": measures.rate("prefix_queries", WINDOW),
                    f"found {SERVER}": measures.rate("prefix_hits", WINDOW),
                },
            )
        )
    return DashboardRow("Prefix cache", tuple(panels))
