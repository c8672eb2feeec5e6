"""`legroom export kubernetes`: a Deployment or a group of pods, with Service, volumes and policies. It
scales by KEDA's ScaledObject, or by a HorizontalPodAutoscaler with rules of prometheus-adapter."""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.cluster import pod, pod_groups
from legroom.exports.deploy.cluster.nodes import NodeSpread, server_of_node, spread_over_nodes
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options
from legroom.exports.deploy.flag_comments import WRITTEN
from legroom.exports.deploy.named_paths import pod_files
from legroom.exports.deploy.yaml_text import Commented, manifest, yaml_text
from legroom.exports.export_request import ExportedFile, ExportRequest
from legroom.exports.prometheus.measures import Measures, in_parens
from legroom.planning.autoscaling_policy import SYNC_S, ScalingPolicy, scaling_policy
from legroom.units import parse_whole

NAME = "kubernetes"
HELP = "a Deployment (a LeaderWorkerSet or RayCluster where it spans nodes), its Service and the claim for its cache"
NEEDS_PLAN = True
_ADAPTER = "Helm values for prometheus-adapter: the metrics that the HorizontalPodAutoscaler reads."


def cluster_settings(options: Mapping[str, Any], nodes: int = 1, *, keeps_volumes: bool = False) -> pod.ClusterSettings:
    """Parsed options of a server on `nodes` nodes; `keeps_volumes`: those of its pods stay. LegroomError if wrong."""
    replicas = _positive_count(options, "replicas", 1)
    most = _positive_count(options, "autoscale", 0)
    if most and most <= replicas:
        hint = f"name more than {replicas}, or leave it out"
        raise LegroomError(f"--autoscale {most} leaves nothing to scale: {replicas} run already", hint)
    pods = max(replicas, most) * nodes
    # Each scale-up would download the model again into a volume of its own.
    several = "shared" if most and nodes == 1 else "pod"
    cache = options.get("cache") or (several if pods > 1 else "claim")
    if cache == "pod" and keeps_volumes:
        cache = "kept"
    namespace = options.get("namespace")
    if namespace is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise LegroomError(f"--namespace {namespace!r} is not a name", "use lowercase letters, digits and dashes")
    return pod.ClusterSettings(
        namespace=namespace,
        replicas=replicas,
        most_replicas=most,
        scaler=(options.get("scaler") or "keda") if most else "",
        prometheus_url=options.get("prometheus_url") or "http://prometheus-operated:9090",
        cache=str(cache),
        restricted=bool(options.get("restricted")),
        network_policy=bool(options.get("network_policy")),
        gpus_per_node=_positive_count(options, "gpus_per_node", pod.DEFAULT_GPUS_PER_NODE),
    )


def _positive_count(options: Mapping[str, Any], name: str, default: int) -> int:
    """The option `name` as a number from 1 to 9,999, or the default where it is not given; LegroomError otherwise."""
    text = options.get(name)
    return default if text is None else parse_whole(str(text), "--" + name.replace("_", "-"), 1, 9_999)


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group, image=True)
    group.add_argument("--namespace", metavar="NAME", help="where it goes (default: left to kubectl)")
    group.add_argument("--replicas", metavar="N", help="copies of the server (default: 1)")
    group.add_argument(
        "--cache",
        choices=("shared", "pod"),
        help="where several pods keep downloads: one volume that all of them write to (ReadWriteMany), or one for each "
        "pod (default: one for each, with --autoscale one for all)",
    )
    group.add_argument("--gpus-per-node", metavar="N", help=f"cards of one node (default: {pod.DEFAULT_GPUS_PER_NODE})")
    about = "non-root, read-only root file system: Pod Security `restricted`"
    group.add_argument("--restricted", action="store_true", help=about)
    about = "only what needs the server may reach it, and its own group"
    group.add_argument("--network-policy", action="store_true", help=about)
    group.add_argument("--autoscale", metavar="N", help="scale up to N replicas, on waiting requests and KV use")
    group.add_argument("--scaler", choices=("hpa", "keda"), help="what scales it (default: keda)")
    group.add_argument("--prometheus-url", metavar="URL", help="for KEDA (default: http://prometheus-operated:9090)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """The manifests in one YAML file, with a Dockerfile and prometheus-adapter values where they are needed."""
    server, settings, over = cluster_server(request)
    created = (*pod.secret_command(server, settings.namespace), *pod_files(server, settings.namespace).commands)
    remarks = (*containers.head_comment(server), *_head_remarks(server, settings, over), *server.remarks, *created)
    text = yaml_text(*manifests(server, settings, over), head=remarks)
    made = containers.with_dockerfile_before(server, ExportedFile(f"{server.name}.yaml", text))
    if settings.scaler == "hpa":
        values = yaml_text(prometheus_adapter_values(server, settings), head=(_ADAPTER, WRITTEN))
        made = (ExportedFile(f"{server.name}-adapter-values.yaml", values, beside=True), *made)
    return made


def cluster_server(request: ExportRequest) -> tuple[ExportedServer, pod.ClusterSettings, NodeSpread]:
    """(the server with one node's flags and GPUs, settings, spread over nodes); LegroomError where that cannot run."""
    plan, over = spread_over_nodes(request.required_plan, cluster_settings(request.options).gpus_per_node)
    server = server_of_node(containers.container_server(replace(request, plan=plan)), over, plan.args)
    settings = cluster_settings(request.options, over.nodes, keeps_volumes=over.nodes > 1 and not over.ray)
    if settings.restricted:
        if server.port < 1024:
            raise LegroomError(f"--port {server.port} needs root", "choose one from 1024 on, or leave out --restricted")
        if on_node := [*([server.model] if server.local_model else []), *pod_files(server).on_node]:
            why = f"{on_node[0]} is mounted from the node, which the Pod Security Standard `restricted` does not allow"
            raise LegroomError(why, "put it on a volume or into the image, or leave out --restricted")
    if over.ray and settings.many_replicas:
        hint = "export it again under another --name, or use --nnodes in place of Ray"
        raise LegroomError("a RayCluster is one server, and several replicas were asked for", hint)
    return server, settings, over


def manifests(server: ExportedServer, settings: pod.ClusterSettings, spread: NodeSpread) -> list[dict[str, Any]]:
    """In order: cache claim (if needed), Deployment, LeaderWorkerSet or RayCluster, Service, optional objects."""
    claim = []
    if not server.local_model and not settings.own_volumes:
        spec = pod.claim_spec(server, "ReadWriteMany" if settings.cache == "shared" else "ReadWriteOnce")
        about = pod.metadata(server, settings, f"{server.name}-cache")
        claim.append(manifest("v1", "PersistentVolumeClaim", about, spec))
    if spread.ray:
        running = pod_groups.ray_cluster(server, settings, spread)
    elif spread.nodes > 1:
        running = pod_groups.leader_worker_set(server, settings, spread)
    else:
        running = _deployment(server, settings)
    return [*claim, running, service(server, settings, spread), *_optional_objects(server, settings, spread)]


def _optional_objects(
    server: ExportedServer, settings: pod.ClusterSettings, spread: NodeSpread
) -> Iterator[dict[str, Any]]:
    """ConfigMap of the sidecar, disruption budget, autoscaler and NetworkPolicy, each only if asked for."""
    if server.options.sidecar:
        yield pod.sidecar_config_map(server, settings)
    if settings.many_replicas:
        why = "A drained node takes one pod; the next is taken when that one serves again. A group counts as one: "
        why += "all of its pods leave and come back together."
        budget = {"maxUnavailable": Commented(why, 1), "selector": {"matchLabels": pod.pod_selector(server)}}
        yield manifest("policy/v1", "PodDisruptionBudget", pod.metadata(server, settings), budget)
    if settings.scaler:
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": server.name}
        if spread.nodes > 1:
            about = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
            target = {**about, "name": pod_groups.group_name(server)}
        scaled = _hpa if settings.scaler == "hpa" else _keda_scaled_object
        yield scaled(server, settings, server_scaling_policy(server, settings), target)
    if settings.network_policy:
        yield network_policy(server, settings, spread)


def _head_remarks(server: ExportedServer, settings: pod.ClusterSettings, spread: NodeSpread) -> Iterator[str]:
    """Head comments on what the cluster must offer for several nodes, a shared cache or autoscaling."""
    if spread.nodes > 1:
        what = "KubeRay" if spread.ray else f"LeaderWorkerSet {pod_groups.LEAST_VERSION} or newer"
        yield f"{spread.nodes_sentence} It needs {what} in the cluster."
        without = "without one, NCCL sends over TCP between the nodes"
        yield f"No RDMA device is asked for, because each network names its own (rdma/...): {without}."
    if spread.ray:
        if server.release.at_least(pod_groups.NO_RAY_SINCE) and server.options.image is None:
            built = "build one with `pip install 'ray[cgraph]'` and name it with --image"
            yield f"vLLM's own image has no Ray from {pod_groups.NO_RAY_SINCE} on: {built}."
    elif spread.nodes > 1:
        yield from pod_groups.leader_worker_set_remarks(server, settings)
    if settings.cache == "shared":
        yield "Its cache is one volume for all pods: the storage class must offer ReadWriteMany."
    if settings.scaler:
        yield f"How it scales: {server_scaling_policy(server, settings).sentence()}"
        tried = f"legroom simulate TRACE --model {server.model} --autoscale {settings.most_replicas}"
        yield f"Try it on a trace of your own: {tried}"
        if settings.scaler == "hpa":
            yield f"Its metrics come from prometheus-adapter: helm values in {server.name}-adapter-values.yaml."


def _deployment(server: ExportedServer, settings: pod.ClusterSettings) -> dict[str, Any]:
    """The Deployment of a server on one node; without `replicas` where an autoscaler sets them."""
    if settings.many_replicas:
        rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
        strategy = Commented("One after another, without spare cards: the others serve meanwhile.", rolling)
    else:
        strategy = Commented("The new pod needs the cards and the volume of the old one.", {"type": "Recreate"})
    replicas = {} if settings.scaler else {"replicas": settings.replicas}
    template = pod.pod_spec(server, settings)
    if settings.many_replicas:
        why = "On nodes of their own where there are enough: one that fails takes one replica."
        template["topologySpreadConstraints"] = Commented(why, [pod.one_pod_per_host(pod.pod_selector(server))])
    spec: dict[str, Any] = {
        **replicas,
        "strategy": strategy,
        "selector": {"matchLabels": pod.pod_selector(server)},
        "template": {"metadata": pod.pod_metadata(server), "spec": template},
    }
    deadline_s = server.times.limit_s * (settings.replicas if settings.many_replicas else 1) + 600
    spec["progressDeadlineSeconds"] = Commented("A rollout that is still loading is not late.", deadline_s)
    return manifest("apps/v1", "Deployment", pod.metadata(server, settings), spec)


def service(server: ExportedServer, settings: pod.ClusterSettings, spread: NodeSpread) -> dict[str, Any]:
    """The Service of the pods that take requests; for a server over several nodes usually the first pod alone."""
    chosen = pod.pod_selector(server)
    if spread.nodes > 1 and not spread.answers_everywhere:
        chosen |= pod_groups.LEADER
    ports = [{"name": "http", "port": server.port, "targetPort": "http"}]
    return manifest("v1", "Service", pod.metadata(server, settings), {"selector": chosen, "ports": ports})


CLIENT = {"legroom.dev/vllm-client": "true"}
"""The label of client pods."""


def network_policy(server: ExportedServer, settings: pod.ClusterSettings, spread: NodeSpread) -> dict[str, Any]:
    """The NetworkPolicy: ingress from labelled clients, from Prometheus and among the pods of a group."""
    ports = [{"port": "http"}]
    scraped = [*ports, {"port": pod.WATCH_PORT_NAME}] if server.options.sidecar else ports
    clients = [{"podSelector": {"matchLabels": CLIENT}}, {"namespaceSelector": {"matchLabels": CLIENT}}]
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    what = "the guard, which is asked before the pool" if server.options.guard else "the server"
    why = f"Pods with this label, or all of a namespace with it, reach {what}."
    why += " Its /-/legroom/ paths need the token as well." if server.options.guard else ""
    rules: list[Any] = [
        Commented(why, {"from": clients, "ports": ports}),
        Commented("Prometheus, in the namespace that it usually has.", {"from": monitoring, "ports": scraped}),
    ]
    if spread.nodes > 1:
        own = {"from": [{"podSelector": {"matchLabels": pod.pod_selector(server)}}]}
        rules.append(Commented("Ranks open ports of their own choice to each other.", own))
    spec = {"podSelector": {"matchLabels": pod.pod_selector(server)}, "policyTypes": ["Ingress"], "ingress": rules}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", pod.metadata(server, settings), spec)


_KV_NAME, _WAITING_NAME = "vllm_kv_use", "vllm_waiting_requests"
"""Metric names of the adapter; Kubernetes allows no colon."""


def server_scaling_policy(server: ExportedServer, settings: pod.ClusterSettings) -> ScalingPolicy:
    """The scaling policy from planned concurrency and start time, with the download if each pod repeats it."""
    start_s = server.times.expected_s - (0.0 if settings.own_volumes else server.times.download_s)
    at_once = server.plan.kv.max_concurrency * server.plan.engines
    return scaling_policy(settings.replicas, settings.most_replicas, start_s, at_once)


def scaling_queries(server: ExportedServer, settings: pod.ClusterSettings) -> tuple[str, str]:
    """PromQL of (waiting requests, KV use), summed over replicas; the autoscaler divides by their number."""
    where = [f'model_name="{server.served_name}"']
    if settings.namespace:
        where.append(f'namespace="{settings.namespace}"')
    measures = Measures(server.release, ", ".join(where), "by (namespace, pod, instance)")
    waiting, use = measures.queued(), measures.value("kv_use", "max")
    return f"sum({in_parens(waiting)})", f"sum({in_parens(use)})"


def _keda_scaled_object(
    server: ExportedServer, settings: pod.ClusterSettings, policy: ScalingPolicy, target: dict[str, str]
) -> dict[str, Any]:
    """The KEDA ScaledObject of the workload `target`, with Prometheus triggers on waiting requests and KV cache use."""
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
    return manifest("keda.sh/v1alpha1", "ScaledObject", pod.metadata(server, settings), spec)


def _keda_trigger(name: str, query: str, threshold: str, settings: pod.ClusterSettings) -> dict[str, Any]:
    """A Prometheus trigger of type AverageValue; a query without a series counts as a failure, not as 0."""
    about: dict[str, Any] = {"serverAddress": settings.prometheus_url, "query": query, "threshold": threshold}
    about["ignoreNullValues"] = Commented("No series is no answer, not a load of 0.", "false")
    return {"type": "prometheus", "name": name, "metricType": "AverageValue", "metadata": about}


def _hpa(
    server: ExportedServer, settings: pod.ClusterSettings, policy: ScalingPolicy, target: dict[str, str]
) -> dict[str, Any]:
    """An autoscaling/v2 HPA of the workload `target` on waiting requests and KV cache use, as averages per replica."""
    levels = {_WAITING_NAME: str(policy.waiting_target), _KV_NAME: f"{round(policy.kv_target_ratio * 1000)}m"}
    metrics: list[Any] = []
    for name, level in levels.items():
        metric = {"name": name, "selector": {"matchLabels": {"model_name": server.name}}}
        average = {"type": "AverageValue", "averageValue": level}
        metrics.append({"type": "External", "external": {"metric": metric, "target": average}})
    metrics[0] = Commented(policy.sentence(), metrics[0])
    replicas = {"minReplicas": policy.least, "maxReplicas": policy.most}
    spec = {"scaleTargetRef": target, **replicas, "metrics": metrics, "behavior": _scaling_behavior(policy)}
    return manifest("autoscaling/v2", "HorizontalPodAutoscaler", pod.metadata(server, settings), spec)


def _scaling_behavior(policy: ScalingPolicy) -> dict[str, Any]:
    """An HPA's `behavior`: up to twice the replicas per period when scaling up, one pod at a time when scaling down."""
    why_up = "For load that lasts: a burst is over before a new replica serves. At most twice as many until those that "
    why_up += "were added serve: their queue does not count twice."
    why_down = "One by one, and only what was not needed for twice as long as it takes to start."
    double = [{"type": "Percent", "value": 100, "periodSeconds": policy.scaling_period_s}]
    one = [{"type": "Pods", "value": 1, "periodSeconds": policy.scaling_period_s}]
    up = {"stabilizationWindowSeconds": policy.up_window_s, "policies": double}
    down = {"stabilizationWindowSeconds": policy.down_window_s, "policies": one}
    return {"scaleUp": Commented(why_up, up), "scaleDown": Commented(why_down, down)}


def prometheus_adapter_values(server: ExportedServer, settings: pod.ClusterSettings) -> dict[str, Any]:
    """Helm values of prometheus-adapter that define the two metrics of the HorizontalPodAutoscaler."""
    # A label has no slash, which a model's name often has, so `model_name` becomes the server's name.
    series = f'{{__name__=~"^vllm:.*",model_name="{server.served_name}"}}'
    queries = dict(zip((_WAITING_NAME, _KV_NAME), scaling_queries(server, settings), strict=True))
    relabelled = {
        name: f'label_replace({query}, "model_name", "{server.name}", "", "")' for name, query in queries.items()
    }
    base = {"seriesQuery": series, "resources": {"namespaced": False}}
    rules = [{**base, "name": {"as": name}, "metricsQuery": query} for name, query in relabelled.items()]
    return {"rules": {"default": False, "external": rules}}
