"""Autoscaling: KEDA's ScaledObject, or a HorizontalPodAutoscaler with rules of prometheus-adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.exports.deploy.cluster.nodes import NodeSpread
from legroom.exports.deploy.cluster.pod import ClusterSettings, metadata
from legroom.exports.deploy.cluster.pod_groups import group_name
from legroom.exports.deploy.exported_server import ExportedServer
from legroom.exports.deploy.yaml_text import Commented, manifest
from legroom.exports.prometheus.measures import Measures, in_parens
from legroom.planning.autoscaling_policy import SYNC_S, ScalingPolicy, scaling_policy

_KV_NAME, _WAITING_NAME = "vllm_kv_use", "vllm_waiting_requests"
"""Metric names of the adapter; Kubernetes allows no colon."""


def server_scaling_policy(server: ExportedServer, settings: ClusterSettings) -> ScalingPolicy:
    """The scaling policy from the planned concurrency and start time, with the download where pods repeat it."""
    start_s = server.times.expected_s - (0.0 if settings.own_volumes else server.times.download_s)
    at_once = server.plan.kv.max_concurrency * server.plan.engines
    return scaling_policy(settings.replicas, settings.most_replicas, start_s, at_once)


def scaling_remarks(server: ExportedServer, settings: ClusterSettings) -> Iterator[str]:
    """Head comments of the manifest: the scaling policy, how to simulate it, and where an HPA's metrics come from."""
    yield f"How it scales: {server_scaling_policy(server, settings).sentence()}"
    tried = f"legroom simulate TRACE --model {server.model} --autoscale {settings.most_replicas}"
    yield f"Try it on a trace of your own: {tried}"
    if settings.scaler == "hpa":
        yield f"Its metrics come from prometheus-adapter: helm values in {server.name}-adapter-values.yaml."


def scaling_queries(server: ExportedServer, settings: ClusterSettings) -> tuple[str, str]:
    """PromQL of (waiting requests, KV use), summed over replicas; the autoscaler divides by their number."""
    where = [f'model_name="{server.served_name}"']
    if settings.namespace:
        where.append(f'namespace="{settings.namespace}"')
    measures = Measures(server.release, ", ".join(where), "by (namespace, pod, instance)")
    waiting, use = measures.queued(), measures.value("kv_use", "max")
    return f"sum({in_parens(waiting)})", f"sum({in_parens(use)})"


def scaler_manifest(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    """The HorizontalPodAutoscaler or, unless the scaler is `hpa`, the KEDA ScaledObject of the server."""
    policy = server_scaling_policy(server, settings)
    scale_target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": server.name}
    if over.nodes > 1:
        about = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
        scale_target = {**about, "name": group_name(server)}
    return (_hpa if settings.scaler == "hpa" else _keda_scaled_object)(server, settings, policy, scale_target)


def _keda_scaled_object(
    server: ExportedServer, settings: ClusterSettings, policy: ScalingPolicy, target: dict[str, str]
) -> dict[str, Any]:
    """The KEDA ScaledObject with Prometheus triggers on waiting requests and KV cache use."""
    waiting, use = scaling_queries(server, settings)
    unchanged = {"failureThreshold": 3, "replicas": policy.least, "behavior": "currentReplicasIfHigher"}
    queued = _keda_trigger("waiting", waiting, str(policy.waiting_target), settings)
    full = _keda_trigger("kv-use", use, f"{policy.kv_target_ratio:g}", settings)
    spec = {
        "scaleTargetRef": target,
        "pollingInterval": SYNC_S,
        "minReplicaCount": policy.least,
        "maxReplicaCount": policy.most,
        "fallback": Commented("Without answers from Prometheus nothing is changed.", unchanged),
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _scaling_behavior(policy)}},
        "triggers": [Commented(policy.sentence(), queued), full],
    }
    return manifest("keda.sh/v1alpha1", "ScaledObject", metadata(server, settings), spec)


def _keda_trigger(name: str, query: str, threshold: str, settings: ClusterSettings) -> dict[str, Any]:
    """A Prometheus trigger of type AverageValue; a query without a series counts as a failure, not as 0."""
    about: dict[str, Any] = {"serverAddress": settings.prometheus_url, "query": query, "threshold": threshold}
    about["ignoreNullValues"] = Commented("No series is no answer, not a load of 0.", "false")
    return {"type": "prometheus", "name": name, "metricType": "AverageValue", "metadata": about}


def _hpa(
    server: ExportedServer, settings: ClusterSettings, policy: ScalingPolicy, target: dict[str, str]
) -> dict[str, Any]:
    """An autoscaling/v2 HPA on two external metrics, requests waiting and KV cache use, as averages per replica."""
    levels = {_WAITING_NAME: str(policy.waiting_target), _KV_NAME: f"{round(policy.kv_target_ratio * 1000)}m"}
    metrics: list[Any] = []
    for name, level in levels.items():
        metric = {"name": name, "selector": {"matchLabels": {"model_name": server.name}}}
        average = {"type": "AverageValue", "averageValue": level}
        metrics.append({"type": "External", "external": {"metric": metric, "target": average}})
    metrics[0] = Commented(policy.sentence(), metrics[0])
    replicas = {"minReplicas": policy.least, "maxReplicas": policy.most}
    spec = {"scaleTargetRef": target, **replicas, "metrics": metrics, "behavior": _scaling_behavior(policy)}
    return manifest("autoscaling/v2", "HorizontalPodAutoscaler", metadata(server, settings), spec)


def _scaling_behavior(policy: ScalingPolicy) -> dict[str, Any]:
    """The `behavior` of an HPA: at most doubled per period upwards, one pod at a time downwards."""
    why_up = "For load that lasts: a burst is over before a new replica serves. At most twice as many until those that "
    why_up += "were added serve: their queue does not count twice."
    why_down = "One by one, and only what was not needed for twice as long as it takes to start."
    double = [{"type": "Percent", "value": 100, "periodSeconds": policy.scaling_period_s}]
    one = [{"type": "Pods", "value": 1, "periodSeconds": policy.scaling_period_s}]
    up = {"stabilizationWindowSeconds": policy.up_window_s, "policies": double}
    down = {"stabilizationWindowSeconds": policy.down_window_s, "policies": one}
    return {"scaleUp": Commented(why_up, up), "scaleDown": Commented(why_down, down)}


def prometheus_adapter_values(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """Helm values of prometheus-adapter that make the two metrics of the HorizontalPodAutoscaler."""
    # A label has no slash, which a model's name often has, so `model_name` becomes the server's name.
    series = f'{{__name__=~"^vllm:.*",model_name="{server.served_name}"}}'
    queries = dict(zip((_WAITING_NAME, _KV_NAME), scaling_queries(server, settings), strict=True))
    relabelled = {
        name: f'label_replace({query}, "model_name", "{server.name}", "", "")' for name, query in queries.items()
    }
    base = {"seriesQuery": series, "resources": {"namespaced": False}}
    rules = [{**base, "name": {"as": name}, "metricsQuery": query} for name, query in relabelled.items()]
    return {"rules": {"default": False, "external": rules}}
