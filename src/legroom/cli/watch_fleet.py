"""`legroom watch --prometheus URL --fleet`: a fleet by model, node pool and release."""

import argparse
import asyncio
import math
from collections.abc import Mapping
from typing import Any

from legroom.cli.incidents import duration_seconds
from legroom.cli.output import print_answer
from legroom.errors import OK, UNREACHABLE, LegroomError
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.prometheus.alert_levels import duration
from legroom.exports.prometheus.measures import Measures, in_parens
from legroom.live.fleet import UNKNOWN, FleetView, GroupKey, ServerUse, fleet_view
from legroom.live.metrics.prometheus_source import PrometheusSource, server_of_labels
from legroom.live.metrics.scrape import open_session
from legroom.planning.plan_document import read_plan
from legroom.render.watch_text import fleet_text
from legroom.sidecar.sources import prometheus_source
from legroom.sidecar.watch_config import SidecarConfig

_POOL_LABELS = ("node_pool", "nodepool", "cloud_google_com_gke_nodepool", "eks_amazonaws_com_nodegroup", "agentpool")
"""Labels that may name the node pool, in order of preference."""
_RELEASE_LABELS = ("vllm_version", "version", "app_kubernetes_io_version", "app_version", "image_tag")
_SERVER_LABELS = ("cluster", "namespace", "pod", "instance", "job")
_MAX_EVALUATIONS = 2000  # Subquery evaluations for the peak of a group.


def run_fleet_view(args: argparse.Namespace, config: SidecarConfig) -> int:
    """Prints the fleet's use over the window of --over, asked of Prometheus; returns 0, or raises LegroomError."""
    if config.prometheus is None:
        raise LegroomError("--fleet looks at a fleet through Prometheus", "add --prometheus URL")
    window_s = duration_seconds(args.over, "--over")
    view = asyncio.run(_query_fleet(args, prometheus_source(config.prometheus), config.prometheus.matchers, window_s))
    if not view.groups:
        raise LegroomError("no server was found", "does it scrape a vLLM, and does --match name one?", UNREACHABLE)
    print_answer(args.json, view.to_json, lambda style: fleet_text(view, duration(window_s), style))
    return OK


def fleet_queries(matchers: str, window_s: float) -> dict[str, str]:
    """{figure, such as `demand`: its PromQL over the window}; `matchers`: PromQL label matchers of the servers."""
    window, step = duration(window_s), duration(60 * math.ceil(window_s / _MAX_EVALUATIONS / 60))

    group = ("model_name", *_POOL_LABELS, *_RELEASE_LABELS)
    each = Measures(None, matchers, f"by ({', '.join((*group, *_SERVER_LABELS))})")
    # The maximum within each step, so that no peak between two evaluations is lost.
    use = in_parens(each.peak("kv_use", step, "max"))
    config = Measures(None, matchers, f"by (num_gpu_blocks, block_size, {', '.join(_SERVER_LABELS)})")
    return {
        "peak_kv_use": each.peak("kv_use", window, "max"),
        "mean_kv_use": each.mean("kv_use", window, "max"),
        "peak_running": each.peak("running", window),
        "peak_waiting": each.peak("waiting", window),
        "mean_waiting": each.mean("waiting", window),
        "preemptions_per_s": each.rate("preemptions", window),
        "cache_config": config.value("cache_config", "max"),
        "demand": f"max_over_time(sum by ({', '.join(group)}) ({use})[{window}:{step}])",
    }


async def _query_fleet(args: argparse.Namespace, source: PrometheusSource, matchers: str, window_s: float) -> FleetView:
    """Use and demand over the window, asked of Prometheus for the servers that the PromQL label `matchers` select."""
    answers: dict[str, list[tuple[dict[str, str], float]]] = {}
    async with open_session() as session:
        for name, query in fleet_queries(matchers, window_s).items():
            answers[name] = await source.query(session, query)
    demand = {_group_key(labels): value for labels, value in answers.pop("demand")}
    if not args.plan:
        return fleet_view(_server_uses(answers), demand, window_s, 1)
    plan = read_plan(args.plan)  # it tells the GPUs of a server, and how long a new one takes
    start_s = planned_server(plan).times.expected_s
    return fleet_view(_server_uses(answers), demand, window_s, plan.gpu.count, start_s=start_s)


def _server_uses(answers: Mapping[str, list[tuple[dict[str, str], float]]]) -> list[ServerUse]:
    """The use of each server from `answers`: {name of a fleet query: its result rows as (labels, value)}."""
    figures: dict[str, dict[str, float]] = {}
    keys: dict[str, GroupKey] = {}
    for name, rows in answers.items():
        for labels, value in rows:
            server = server_of_labels(labels)
            known = figures.setdefault(server, {})
            if name == "cache_config":
                blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
                known["kv_tokens"] = int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0
            else:
                known[name] = value
                keys[server] = _group_key(labels)
    filled: dict[str, dict[str, Any]] = {server: {"kv_tokens": 0, **known} for server, known in figures.items()}
    return [ServerUse(server, key, **filled[server]) for server, key in keys.items()]


def _group_key(labels: Mapping[str, str]) -> GroupKey:
    """(model, node pool, release) of a series' labels: servers with equal keys form a group."""
    names = (_POOL_LABELS, _RELEASE_LABELS)
    pool, release = (next((labels[name] for name in each if labels.get(name)), UNKNOWN) for each in names)
    return GroupKey(labels.get("model_name", UNKNOWN), pool, release)
