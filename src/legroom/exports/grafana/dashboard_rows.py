"""The rows and panels of the dashboard, independent of Grafana's SDK."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from legroom.exports.prometheus.alert_levels import AlertLevels
from legroom.exports.prometheus.alerts import NO_ROOM_REASONS, fragmentation_share, turned_away_share
from legroom.exports.prometheus.measures import Measures, in_parens
from legroom.facts.releases import Release
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass

WINDOW = "$__rate_interval"
INSTANCE = 'cluster=~"$cluster", namespace=~"$namespace", job=~"$job", instance=~"$instance"'
"""A series without one of these labels matches `.*` as well."""
SELECTOR = f'model_name=~"$model", {INSTANCE}'
BY_INSTANCE = "by (cluster, namespace, job, instance)"
BY_SERVER = "by (cluster, namespace, job, instance, model_name)"
BY_ENGINE = "by (cluster, namespace, job, instance, model_name, engine)"
SERVER = "{{model_name}} {{instance}}"
_BY_GUARD = f"sum {BY_INSTANCE}"
_CACHE_LABELS = (
    "cluster, namespace, job, instance, engine, num_gpu_blocks, block_size, cache_dtype, gpu_memory_utilization"
)
"""The labels of `vllm:cache_config_info` that the table shows."""
_LAYOUT_PARTS = {
    "weights_bytes": "weights",
    "activation_bytes": "activations",
    "cuda_graph_bytes": "CUDA graphs",
    "non_torch_bytes": "outside PyTorch",
    "kv_cache_bytes": "KV cache",
    "outside_bytes": "beside the budget",
    "headroom_bytes": "left free",
}
_DESCRIPTIONS = {
    "Waiting for room": "Requests that wait for blocks or for a place in the batch, on all chosen servers.",
    "Generated": "Tokens per second that the chosen servers generate together.",
    "Slowest first token": "The 99th percentile of the time to the first token, on the slowest chosen server.",
    "Waiting": "Requests that wait for blocks or for a place in the batch.",
    "Time in the queue": "From arrival to the first step, as percentiles over all requests of a server.",
    "Refused by vLLM": "Requests per second that --max-num-queued-reqs or --max-num-queued-tokens refused.",
    "Prompt tokens": "Prompt tokens per second, cached ones included.",
    "Generated tokens": "Tokens per second.",
    "Finished requests": "Requests per second that ended, for whatever reason.",
    "Time to first token": "Queue, prefill and the first step.",
    "Time between tokens": "How smoothly answers stream. A preemption shows as a long gap.",
    "Whole request": "From arrival to the last token.",
    "KV cache in use": "Share of the pool's blocks that running requests hold. Cached blocks that nobody uses do "
    "not count in V1. A full pool without a queue is healthy.",
    "Preemptions": "Requests per second that lost their blocks and will be computed again. The counter moves when "
    "the victim runs again.",
    "Preemptions per finished request": "How much work is done again for each request that gets done.",
    "Recomputed share": "Computed tokens that had been computed before. Counted by 0.16.0 to 0.19.1; else an "
    "upper bound: each preempted request held as much as a running one does on average.",
    "Prefix cache hit rate": "Share of looked-up prompt tokens that were found. A low rate costs a little hashing and "
    "no memory: cached blocks are freed on demand.",
    "Prefix cache look-ups": "Prompt tokens per second that were looked up and found (blocks before 0.9.0).",
    "Admitted and refused": "Requests per second that reached the guard. No room means 429 with Retry-After; the "
    "others exceeded a limit of the policy.",
    "Share refused for lack of room": "Of all requests that kept to the limits of the policy.",
    "Reserved of the pool": "Tokens that admitted requests may grow to, compared with what the guard may hand out.",
    "Wait for admission": "99th percentile of how long admitted requests waited.",
    "Requests inside and waiting": "As the guard counts them, and whether it is draining.",
    "Open incidents": "What the sidecar's detectors have found and that is not over yet, by kind.",
    "Healthy servers": "1: the server answered the last scrape and nothing critical was found.",
    "Scrapes": "Scrapes of servers per second, by result.",
    "Memory in use": "What the card shows as used, by worker; without a GPU, what the worker's process holds. The KV "
    "pool is part of it and never changes: growth is something else.",
    "Allocator fragmentation": "Share of what PyTorch reserves that is not in use.",
}
"""The help text of each panel whose text does not depend on the plan."""


@dataclass(frozen=True)
class Panel:
    title: str
    queries: Mapping[str, str]
    """The PromQL expression of each legend."""
    unit: str = "short"
    width: int = 12
    """Columns of 24."""
    levels: tuple[tuple[float, str], ...] = ()
    """Thresholds with their colours; below the first it is green."""
    max: float | None = None
    kind: Literal["timeseries", "stat", "bargauge", "table"] = "timeseries"
    own_description: str = ""
    """The help text, where it depends on the plan or on a threshold."""

    @property
    def description(self) -> str:
        """The panel's help text: its own, else the fixed one for its title."""
        return self.own_description or _DESCRIPTIONS[self.title]


@dataclass(frozen=True)
class DashboardRow:
    title: str
    panels: tuple[Panel, ...]
    needs: str = ""
    """What must run besides vLLM for it to have data."""


def dashboard_rows(release: Release | None, levels: AlertLevels, plan: PlanDocument | None) -> tuple[DashboardRow, ...]:
    """The rows of vLLM's metrics that the release has, then those of the guard, the sidecar and the workers."""
    measures = Measures(release, SELECTOR, BY_SERVER)
    panels = (
        Panel("Prompt tokens", {SERVER: measures.rate("prompt_tokens", WINDOW)}, width=8),
        Panel("Generated tokens", {SERVER: measures.rate("generation_tokens", WINDOW)}, width=8),
        Panel("Finished requests", {SERVER: measures.finished("rate", WINDOW)}, "reqps", 8),
    )
    rows = [
        _overview_row(measures, levels),
        _memory_row(measures, plan),
        _kv_cache_row(measures, levels),
        _queue_row(measures, levels, plan),
        DashboardRow("Throughput", panels),
        _latency_row(measures, levels),
    ]
    if measures.has("preemptions"):
        rows.append(_preemptions_row(measures, levels, plan))
    if measures.has("prefix_hits") or measures.has("prefix_hit_rate"):
        rows.append(_prefix_cache_row(measures))
    return (*rows, _guard_row(levels), _sidecar_row(), _workers_row(levels))


def _pool_colors(levels: AlertLevels) -> tuple[tuple[float, str], ...]:
    """(KV cache use, colour) from which a panel is yellow, then orange."""
    return ((levels.detect.pool_calm_ratio, "yellow"), (levels.detect.pool_full_ratio, "orange"))


def _target_color(seconds: float | None) -> tuple[tuple[float, str], ...]:
    """(Threshold in seconds, `red`) of a latency target; empty for None."""
    return ((seconds, "red"),) if seconds is not None else ()


def _percentile_queries(measures: Measures, role: str) -> dict[str, str]:
    """PromQL of a latency's p50, p90 and p99, by legend."""
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return {f"{name} {SERVER}": measures.quantile(role, share, WINDOW) for share, name in shares}


def _overview_row(measures: Measures, levels: AlertLevels) -> DashboardRow:
    """Panels on KV cache use, waiting requests, generated tokens and the slowest first token."""
    window = levels.time(levels.rate_window_s)
    fullest = f"max({measures.peak('kv_use', window, 'max')})"
    about_kv = f"The fullest pool of the chosen servers within {window}: between two requests it is emptier. "
    about_kv += "Full alone is healthy: look at the queue next to it."
    tokens = f"sum({measures.rate('generation_tokens', WINDOW)})"
    ttft, ttft_level = f"max({measures.quantile('ttft', 0.99, WINDOW)})", _target_color(levels.ttft_p99_s)
    waiting, queue_level = f"sum({measures.queued()})", ((levels.detect.queue_least, "orange"),)
    panels = (
        Panel("KV cache in use", {"fullest": fullest}, "percentunit", 6, _pool_colors(levels), 1.0, "stat", about_kv),
        Panel("Waiting for room", {"waiting": waiting}, "short", 6, queue_level, kind="stat"),
        Panel("Generated", {"tokens/s": tokens}, "short", 6, kind="stat"),
        Panel("Slowest first token", {"p99": ttft}, "s", 6, ttft_level, kind="stat"),
    )
    return DashboardRow("Overview", panels)


def _memory_row(measures: Measures, plan: PlanDocument | None) -> DashboardRow:
    """Panels on the KV pool that servers report and, with a plan, on its memory layout and pool beside it."""
    # The settings are the labels of this metric: they are what is shown, not parts to add up.
    reported = Measures(measures.release, INSTANCE, f"by ({_CACHE_LABELS})").value("cache_config", "max")
    about = "num_gpu_blocks and block_size are the pool that vLLM allocated at start"
    if plan is None:
        about += ". `legroom export grafana --plan FILE` puts the plan beside it."
    else:
        about += f"; the plan says {plan.kv.num_blocks:,} blocks of {plan.kv.block_size} tokens."
    width = 24 if plan is None else 8 if plan.kv.num_blocks else 12
    title = "The pool as the servers report it"
    settings = Panel(title, {"{{instance}}": reported}, width=width, kind="table", own_description=about)
    if plan is None:
        return DashboardRow("Memory", (settings,))
    where = f"{plan.model} on {plan.gpu.count} x {plan.gpu.name}"
    about = f"Where every byte of the tightest GPU goes, by the plan for {where}."
    parts = {label: f"vector({size})" for name, label in _LAYOUT_PARTS.items() if (size := getattr(plan.layout, name))}
    layout = Panel("Planned layout of one GPU", parts, "bytes", width, kind="bargauge", own_description=about)
    return DashboardRow("Memory: the plan against reality", (layout, *_token_panel(measures, plan), settings))


def _token_panel(measures: Measures, plan: PlanDocument) -> tuple[Panel, ...]:
    """A panel of the tokens in the KV cache against the planned pool; none for a model without a KV cache."""
    tokens = pool_tokens(plan)
    if not tokens:
        return ()
    pool = f"pool of {plan.kv.tokens:,} tokens"
    pools = pool if plan.engines == 1 else f"{plan.engines} pools, each a {pool}"
    room = f"{plan.kv.max_concurrency * plan.engines:.1f} requests of {plan.args['max_model_len']:,} tokens"
    about = f"KV use times the planned {pools}. The line is the pool: {room}."
    used = {SERVER: f"{tokens} * {in_parens(measures.value('kv_use', 'avg'))}", "planned pool": f"vector({tokens})"}
    return (Panel("Tokens in the KV cache", used, width=8, levels=((tokens, "red"),), own_description=about),)


def pool_tokens(plan: PlanDocument) -> int:
    """The KV cache tokens of all data-parallel engines of the planned server."""
    return plan.kv.tokens * plan.engines


def _kv_cache_row(measures: Measures, levels: AlertLevels) -> DashboardRow:
    """Panels on KV cache use, and on requests that wait because the pool is full."""
    use = {SERVER: measures.value("kv_use", "max")}
    about = f"Requests that wait while the pool is at least {levels.detect.pool_full_ratio:.0%} full, or has no room "
    about += "for one more like those that run: above zero, the pool is what they wait for."
    panels = (
        Panel("KV cache in use", use, "percentunit", levels=_pool_colors(levels), max=1.0),
        Panel("Pressure", {SERVER: pressure_query(measures, levels)}, levels=((1, "red"),), own_description=about),
    )
    return DashboardRow("KV cache", panels)


def pressure_query(measures: Measures, levels: AlertLevels) -> str:
    """PromQL of the number of requests that wait because the pool is full, as the alert counts them."""
    each, window = replace(measures, keep=BY_ENGINE), levels.time(levels.rate_window_s)
    kv, running = (in_parens(each.peak(*what)) for what in (("kv_use", window, "max"), ("running", window)))
    full = f"({kv} >= bool {levels.detect.pool_full_ratio:g})"
    one_more = f"({kv} > bool 0.5) * ({kv} * (1 + 1 / {running}) > bool 1)"
    return f"sum {BY_SERVER} ({in_parens(each.queued())} * ({full} + {one_more} > bool 0))"


def _queue_row(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> DashboardRow:
    """Panels on running and waiting requests, with the planned limits."""
    about = "Requests in the batch."
    batch: tuple[tuple[float, str], ...] = ()
    if plan is not None:
        limit, engines = plan.args["max_num_seqs"], plan.engines
        times = f" on each of {engines} data-parallel engines" if engines > 1 else ""
        about += f" The line is --max-num-seqs {limit}{times}."
        batch = ((float(limit * engines), "orange"),)
    running = {SERVER: measures.value("running")}
    queue_level = ((levels.detect.queue_least, "orange"),)
    panels = [
        Panel("Running", running, width=8, levels=batch, own_description=about),
        Panel("Waiting", {SERVER: measures.queued()}, width=8, levels=queue_level),
    ]
    if measures.has("queue_time"):
        panels.append(Panel("Time in the queue", _percentile_queries(measures, "queue_time"), "s", 8))
    if measures.has("admission_rejections"):
        # One series a reason, none before the first refusal: shown as nothing refused.
        by_instance = Measures(measures.release, INSTANCE, BY_INSTANCE)
        refused = in_parens(by_instance.rate("admission_rejections", WINDOW))
        queries = {"{{instance}}": f"{refused}\nor\n0 * sum {BY_INSTANCE} (up{{{INSTANCE}}})"}
        panels.append(Panel("Refused by vLLM", queries, "reqps", 24))
    return DashboardRow("Queue", tuple(panels))


def _latency_row(measures: Measures, levels: AlertLevels) -> DashboardRow:
    """Panels on time to first token, per token and in total, with the targets."""
    latencies = (
        ("Time to first token", "ttft", levels.ttft_p99_s),
        ("Time between tokens", "inter_token", levels.inter_token_p99_s),
        ("Whole request", "e2e_latency", None),
    )
    panels = (
        Panel(title, _percentile_queries(measures, role), "s", 8, _target_color(target_s))
        for title, role, target_s in latencies
    )
    return DashboardRow("Latency", tuple(panels))


def _preemptions_row(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> DashboardRow:
    """Panels on preemptions and the share of recomputed tokens."""
    detect, rate = levels.detect, measures.rate("preemptions", WINDOW)
    per_request = f"{in_parens(rate)} / ({in_parens(measures.finished('rate', WINDOW))} > 0)"
    many = ((detect.preemptions_per_request, "red"),)
    panels = [
        Panel("Preemptions", {SERVER: rate}, "reqps", 8, ((detect.alert_preemptions_per_s, "red"),)),
        Panel("Preemptions per finished request", {SERVER: per_request}, width=8, levels=many),
    ]
    if share := recomputed_share(measures, plan):
        level = ((detect.preemption_share_ratio, "red"),)
        panels.append(Panel("Recomputed share", {SERVER: share}, "percentunit", 8, level))
    return DashboardRow("Preemptions", tuple(panels))


def recomputed_share(measures: Measures, plan: PlanDocument | None) -> str:
    """PromQL of the share of tokens recomputed after preemption; empty without a counter or pool size."""
    useful = " + ".join(in_parens(measures.rate(role, WINDOW)) for role in ("prompt_tokens", "generation_tokens"))
    recomputed = []
    if measures.has("prompt_tokens_recomputed"):
        recomputed.append(in_parens(measures.rate("prompt_tokens_recomputed", WINDOW)))
    if plan is not None and pool_tokens(plan):
        use, running = in_parens(measures.value("kv_use", "avg")), in_parens(measures.value("running"))
        tokens_each = f"{pool_tokens(plan)} * {use} / ({running} > 0)"
        recomputed.append(f"{in_parens(measures.rate('preemptions', WINDOW))} * {tokens_each}")
    return "\nor\n".join(f"{again} / ({again} + {useful} > 0)" for again in recomputed)


def _prefix_cache_row(measures: Measures) -> DashboardRow:
    """Panels on the share of prompt tokens found in the prefix cache and, where counted, the look-ups."""
    panels = [Panel("Prefix cache hit rate", {SERVER: measures.prefix_hit_ratio(WINDOW)}, "percentunit", max=1.0)]
    if measures.has("prefix_hits"):
        roles = {"looked up": "prefix_queries", "found": "prefix_hits"}
        rates = {f"{legend} {SERVER}": measures.rate(role, WINDOW) for legend, role in roles.items()}
        panels.append(Panel("Prefix cache look-ups", rates))
    return DashboardRow("Prefix cache", tuple(panels))


def _guard_row(levels: AlertLevels) -> DashboardRow:
    """Panels on what the guard admits, queues and refuses."""
    rejected = f'{_BY_GUARD} (rate(legroom_guard_rejected_total{{reason%s"{NO_ROOM_REASONS}"}}[{WINDOW}]))'
    admission = {
        "admitted {{instance}}": f"{_BY_GUARD} (rate(legroom_guard_admitted_total[{WINDOW}]))",
        "no room {{instance}}": rejected % "=~",
        "refused {{instance}}": rejected % "!~",
    }
    refused, level = ({"{{instance}}": turned_away_share(WINDOW, BY_INSTANCE)}, ((levels.detect.refused_ratio, "red"),))
    amounts = ("reserved", "queued", "pool")
    tokens = {f"{what} {{{{instance}}}}": f"{_BY_GUARD} (legroom_guard_{what}_tokens)" for what in amounts}
    waits = f"rate(legroom_guard_wait_seconds_bucket[{WINDOW}])"
    wait = f"histogram_quantile(0.99, sum by (le, cluster, namespace, job, instance) ({waits})) >= 0"
    requests = {
        "inside {{instance}}": f"{_BY_GUARD} (legroom_guard_running)",
        "waiting {{instance}}": f"{_BY_GUARD} (legroom_guard_waiting)",
        "draining {{instance}}": f"max {BY_INSTANCE} (legroom_guard_draining)",
    }
    panels = (
        Panel("Admitted and refused", admission, "reqps", 8),
        Panel("Share refused for lack of room", refused, "percentunit", 8, level, 1.0),
        Panel("Reserved of the pool", tokens, width=8),
        Panel("Wait for admission", {"p99 {{instance}}": wait}, "s"),
        Panel("Requests inside and waiting", requests),
    )
    return DashboardRow("Guard", panels, "legroom.guard.Guard or legroom guard")


def _sidecar_row() -> DashboardRow:
    """Panels on the sidecar's open incidents, healthy servers and scrapes."""
    incidents = {"{{kind}}": "sum by (cluster, namespace, job, kind) (legroom_incidents_open)"}
    healthy = {"{{server}}": "min by (cluster, namespace, job, server) (legroom_server_healthy)"}
    scrapes = {"{{result}}": f"sum by (cluster, namespace, job, result) (rate(legroom_looks_total[{WINDOW}]))"}
    panels = (
        Panel("Open incidents", incidents, width=8),
        Panel("Healthy servers", healthy, width=8, max=1.0),
        Panel("Scrapes", scrapes, width=8),
    )
    return DashboardRow("legroom watch", panels, "legroom watch --daemon")


def _workers_row(levels: AlertLevels) -> DashboardRow:
    """GPU memory in use and allocator fragmentation of each rank, where the workers report them."""
    legend, level = "{{instance}} {{rank}}", ((levels.detect.fragmentation_ratio, "orange"),)
    panels = (
        Panel("Memory in use", {legend: "legroom_worker_used_bytes"}, "bytes"),
        Panel("Allocator fragmentation", {legend: fragmentation_share()}, "percentunit", levels=level, max=1.0),
    )
    return DashboardRow("Inside the workers", panels, "LEGROOM_WORKER_MEMORY=1 where legroom is installed beside vLLM")
