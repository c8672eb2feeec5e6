"""What the dashboard shows, row by row: expressions, units, levels, and what each panel means. No Grafana in here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from legroom.exports.promql import Measures, grouped
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.exports.alert_levels import AlertLevels
    from legroom.exports.plan_document import PlanDocument
    from legroom.facts.releases import Release

WINDOW = "$__rate_interval"
INSTANCE = 'instance=~"$instance"'
SELECTOR = f'model_name=~"$model", {INSTANCE}'
SERVER = "{{model_name}} {{instance}}"
_BY_SERVER = "by (instance, model_name)"
_SETTINGS = ("instance", "engine", "num_gpu_blocks", "block_size", "cache_dtype", "gpu_memory_utilization")
"""The labels of vLLM's cache settings that a reader compares with a plan."""
_PARTS = {
    "weights_bytes": "weights",
    "activation_bytes": "activations",
    "cuda_graph_bytes": "CUDA graphs",
    "non_torch_bytes": "outside PyTorch",
    "kv_cache_bytes": "KV cache",
    "outside_bytes": "beside the budget",
    "headroom_bytes": "left free",
}

Kind = Literal["timeseries", "stat", "bargauge", "table"]


@dataclass(frozen=True)
class Query:
    """One expression and the name of its line."""

    expr: str
    legend: str = SERVER


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    says: str
    """What it shows and how to read it; Grafana shows it at the panel's `i`."""
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 12
    """Of 24 columns."""
    levels: tuple[tuple[float, str], ...] = ()
    """From which value on which colour; below the first it is green."""
    max: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    needs: str = ""
    """What must run for it to have data; empty: vLLM alone."""


def vllm_rows(release: Release | None, levels: AlertLevels, plan: PlanDocument | None) -> tuple[Row, ...]:
    """The rows on vLLM's own metrics."""
    measures = Measures(release, SELECTOR, _BY_SERVER)
    found = [_overview(measures, levels)]
    found.append(_memory(release, measures, plan))
    found += [
        _kv(measures, levels),
        _queue(measures, levels, plan),
        _throughput(measures),
        _latency(measures, levels),
    ]
    if measures.has("preemptions"):
        found.append(_preemptions(measures, levels, plan))
    if measures.has("prefix_hits") or measures.has("prefix_hit_rate"):
        found.append(_prefix(measures))
    return tuple(found)


def _pool_levels(levels: AlertLevels) -> tuple[tuple[float, str], ...]:
    return ((levels.detect.pool_calm_ratio, "yellow"), (levels.detect.pool_full_ratio, "orange"))


def _overview(measures: Measures, levels: AlertLevels) -> Row:
    kv, waiting = measures.value("kv_use", "max"), measures.queued()
    tokens = measures.rate("generation_tokens", WINDOW)
    ttft = measures.quantile("ttft", 0.99, WINDOW)
    stats = (
        Panel(
            "KV cache in use",
            "The fullest pool of the chosen servers. Full alone is healthy: look at the queue beside it.",
            (Query(f"max({kv})", "fullest"),),
            "percentunit",
            "stat",
            6,
            _pool_levels(levels),
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
            "Tokens a second that the chosen servers generate together.",
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
            _target(levels.ttft_p99_s),
        ),
    )
    return Row("Overview", stats)


def _target(seconds: float | None) -> tuple[tuple[float, str], ...]:
    return ((seconds, "red"),) if seconds is not None else ()


def _memory(release: Release | None, measures: Measures, plan: PlanDocument | None) -> Row:
    # The settings are the labels of this metric: they are what is shown, not parts to add up.
    reported = Measures(release, INSTANCE, f"by ({', '.join(_SETTINGS)})")
    settings = Panel(
        "The pool as the servers report it",
        "num_gpu_blocks and block_size are the pool that vLLM allocated at start"
        + (
            f"; the plan says {plan.kv['num_blocks']:,} blocks of {plan.kv['block_size']} tokens."
            if plan
            else ". `legroom export grafana --plan FILE` puts the plan beside it."
        ),
        (Query(reported.value("cache_config", "max"), "{{instance}}"),),
        "short",
        "table",
        24 if plan is None else 8,
    )
    if plan is None:
        return Row("Memory", (settings,))
    layout = tuple(
        Query(f"vector({plan.layout[name]})", label) for name, label in _PARTS.items() if plan.layout.get(name)
    )
    tokens = plan.kv["tokens"]
    held = f"{tokens} * {grouped(measures.value('kv_use', 'avg'))}"
    return Row(
        "Memory: the plan against reality",
        (
            Panel(
                "Planned layout of one GPU",
                f"Where every byte of the tightest GPU goes, by the plan for {plan.model} on "
                f"{plan.gpu['count']} x {plan.gpu['name']}.",
                layout,
                "bytes",
                "bargauge",
                8,
            ),
            Panel(
                "Tokens in the KV cache",
                f"KV use times the planned pool of {tokens:,} tokens. The line is the pool: "
                f"{plan.kv['max_concurrency']:.1f} requests of {plan.args['max_model_len']:,} tokens.",
                (Query(held), Query(f"vector({tokens})", "planned pool")),
                "short",
                "timeseries",
                8,
                ((tokens, "red"),),
            ),
            settings,
        ),
    )


def _kv(measures: Measures, levels: AlertLevels) -> Row:
    kv, queued = grouped(measures.value("kv_use", "max")), grouped(measures.queued())
    pressure = f"{queued} * ({kv} >= bool {levels.detect.pool_full_ratio:g})"
    return Row(
        "KV cache",
        (
            Panel(
                "KV cache in use",
                "Share of the pool's blocks that running requests hold. Cached blocks that nobody uses do "
                "not count in V1. A full pool without a queue does what it is for.",
                (Query(measures.value("kv_use", "max")),),
                "percentunit",
                "timeseries",
                12,
                _pool_levels(levels),
                1.0,
            ),
            Panel(
                "Pressure",
                f"Requests that wait while the pool is at least {levels.detect.pool_full_ratio:.0%} full: above "
                "zero, the pool is what they wait for.",
                (Query(pressure),),
                "short",
                "timeseries",
                12,
                ((1, "red"),),
            ),
        ),
    )


def _queue(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> Row:
    batch = ((float(plan.args["max_num_seqs"]), "orange"),) if plan else ()
    limit = f" The line is --max-num-seqs {plan.args['max_num_seqs']}." if plan else ""
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
                _percentiles(measures, "queue_time"),
                "s",
                "timeseries",
                8,
            )
        )
    if measures.has("admission_rejections"):
        # One series a reason, none before the first refusal: shown as nothing refused.
        refused = (
            f"{grouped(Measures(measures.release, INSTANCE, 'by (instance)').rate('admission_rejections', WINDOW))}"
        )
        nothing = f"0 * sum by (instance) (up{{{INSTANCE}}})"
        panels.append(
            Panel(
                "Refused by vLLM",
                "Requests a second that --max-num-queued-reqs or --max-num-queued-tokens refused.",
                (Query(f"{refused}\nor\n{nothing}", "{{instance}}"),),
                "reqps",
                "timeseries",
                24,
            )
        )
    return Row("Queue", tuple(panels))


def _percentiles(measures: Measures, role: str) -> tuple[Query, ...]:
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return tuple(Query(measures.quantile(role, share, WINDOW), f"{name} {SERVER}") for share, name in shares)


def _throughput(measures: Measures) -> Row:
    return Row(
        "Throughput",
        (
            Panel(
                "Prompt tokens",
                "Prompt tokens a second, cached ones included.",
                (Query(measures.rate("prompt_tokens", WINDOW)),),
                "short",
                "timeseries",
                8,
            ),
            Panel(
                "Generated tokens",
                "Tokens a second.",
                (Query(measures.rate("generation_tokens", WINDOW)),),
                "short",
                "timeseries",
                8,
            ),
            Panel(
                "Finished requests",
                "Requests a second that ended, for whatever reason.",
                (Query(measures.finished_rate(WINDOW)),),
                "reqps",
                "timeseries",
                8,
            ),
        ),
    )


def _latency(measures: Measures, levels: AlertLevels) -> Row:
    return Row(
        "Latency",
        (
            Panel(
                "Time to first token",
                "Queue, prefill and the first step.",
                _percentiles(measures, "ttft"),
                "s",
                "timeseries",
                8,
                _target(levels.ttft_p99_s),
            ),
            Panel(
                "Time between tokens",
                "How smoothly answers stream. A preemption shows as a long gap.",
                _percentiles(measures, "inter_token"),
                "s",
                "timeseries",
                8,
                _target(levels.inter_token_p99_s),
            ),
            Panel(
                "Whole request",
                "From arrival to the last token.",
                _percentiles(measures, "e2e_latency"),
                "s",
                "timeseries",
                8,
            ),
        ),
    )


def _preemptions(measures: Measures, levels: AlertLevels, plan: PlanDocument | None) -> Row:
    detect = levels.detect
    rate, finished = measures.rate("preemptions", WINDOW), measures.finished_rate(WINDOW)
    panels = [
        Panel(
            "Preemptions",
            "Requests a second that lost their blocks and will be computed again. The counter moves when "
            "the victim runs again.",
            (Query(rate),),
            "reqps",
            "timeseries",
            8,
            ((detect.alert_preemptions_per_s, "red"),),
        ),
        Panel(
            "Preemptions per finished request",
            "How much work is done twice for each piece that gets done.",
            (Query(f"{grouped(rate)} / ({finished} > 0)"),),
            "short",
            "timeseries",
            8,
            ((detect.preemptions_per_request, "red"),),
        ),
    ]
    share = recomputed_share(measures, plan)
    if share:
        panels.append(
            Panel(
                "Recomputed share",
                "Computed tokens that had been computed before. Counted by 0.16.0 to 0.19.1; else an "
                "upper bound: each preempted request held as much as a running one does on average.",
                (Query(share),),
                "percentunit",
                "timeseries",
                8,
                ((detect.preemption_share_ratio, "red"),),
            )
        )
    return Row("Preemptions", tuple(panels))


def recomputed_share(measures: Measures, plan: PlanDocument | None) -> str:
    """Tokens computed again, of all that were computed; empty where neither a counter nor a pool size tells."""
    useful = (
        f"{grouped(measures.rate('prompt_tokens', WINDOW))} + {grouped(measures.rate('generation_tokens', WINDOW))}"
    )
    ways = []
    if measures.has("prompt_tokens_recomputed"):
        again = grouped(measures.rate("prompt_tokens_recomputed", WINDOW))
        ways.append(f"{again} / ({again} + {useful} > 0)")
    if plan is not None:
        held = f"{plan.kv['tokens']} * {grouped(measures.value('kv_use', 'avg'))} / ({measures.value('running')} > 0)"
        again = f"{grouped(measures.rate('preemptions', WINDOW))} * {held}"
        ways.append(f"{again} / ({again} + {useful} > 0)")
    return "\nor\n".join(ways)


def _prefix(measures: Measures) -> Row:
    panels = [
        Panel(
            "Prefix cache hit rate",
            "Share of looked-up prompt tokens that were found. Low costs a little hashing and no "
            "memory: cached blocks are given up on demand.",
            (Query(measures.prefix_hit_ratio(WINDOW)),),
            "percentunit",
            "timeseries",
            12,
            (),
            1.0,
        ),
    ]
    if measures.has("prefix_hits"):
        panels.append(
            Panel(
                "Prefix cache look-ups",
                "Prompt tokens a second that were looked up and found (blocks before 0.9.0).",
                (
                    Query(measures.rate("prefix_queries", WINDOW), f"looked up {SERVER}"),
                    Query(measures.rate("prefix_hits", WINDOW), f"found {SERVER}"),
                ),
                "short",
                "timeseries",
                12,
            )
        )
    return Row("Prefix cache", tuple(panels))
