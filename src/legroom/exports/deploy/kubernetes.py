"""`legroom export kubernetes`: a Deployment or a group of pods, with Service, volumes, scaling and policies."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.cluster import autoscaling, pod, pod_groups
from legroom.exports.deploy.cluster.nodes import NodeSpread, server_of_node, spread_over_nodes
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options
from legroom.exports.deploy.flag_comments import WRITTEN
from legroom.exports.deploy.named_paths import create_commands, paths_on_node
from legroom.exports.deploy.yaml_text import Commented, manifest, yaml_text
from legroom.exports.export_request import ExportedFile, ExportRequest
from legroom.units import parse_whole

NAME = "kubernetes"
HELP = "a Deployment (a LeaderWorkerSet or RayCluster where it spans nodes), its Service and the claim for its cache"
NEEDS_PLAN = True
_ADAPTER = "Helm values for prometheus-adapter: the metrics that the HorizontalPodAutoscaler reads."


def cluster_settings(options: Mapping[str, Any], nodes: int = 1, *, keeps_volumes: bool = False) -> pod.ClusterSettings:
    """Parsed options of a server over `nodes`; `keeps_volumes`: a pod's volume outlives it. LegroomError if wrong."""
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
    created = (*pod.secret_command(server, settings.namespace), *create_commands(server, settings.namespace))
    remarks = (*containers.head_comment(server), *_head_remarks(server, settings, over), *server.remarks, *created)
    text = yaml_text(*manifests(server, settings, over), head=remarks)
    made = containers.with_dockerfile_before(server, ExportedFile(f"{server.name}.yaml", text))
    if settings.scaler == "hpa":
        values = yaml_text(autoscaling.prometheus_adapter_values(server, settings), head=(_ADAPTER, WRITTEN))
        made = (ExportedFile(f"{server.name}-adapter-values.yaml", values, beside=True), *made)
    return made


def cluster_server(request: ExportRequest) -> tuple[ExportedServer, pod.ClusterSettings, NodeSpread]:
    """(the server with one node's flags and GPUs, settings, spread over nodes); LegroomError where that cannot run."""
    plan, over = spread_over_nodes(request.required_plan, cluster_settings(request.options).gpus_per_node)
    server = server_of_node(containers.container_server(replace(request, plan=plan)), over, plan.args)
    settings = cluster_settings(request.options, over.nodes, keeps_volumes=over.nodes > 1 and not over.ray)
    if settings.restricted:
        pod.check_restricted_pod_security(server, paths_on_node(server))
    if over.ray and settings.many_replicas:
        hint = "export it again under another --name, or use --nnodes in place of Ray"
        raise LegroomError("a RayCluster is one server, and several replicas were asked for", hint)
    return server, settings, over


def manifests(server: ExportedServer, settings: pod.ClusterSettings, over: NodeSpread) -> list[dict[str, Any]]:
    """Claim (if needed), workload (Deployment, LeaderWorkerSet, RayCluster), Service, optional ones, in order."""
    claim = []
    if not server.local_model and not settings.own_volumes:
        spec = pod.claim_spec(server, "ReadWriteMany" if settings.cache == "shared" else "ReadWriteOnce")
        about = pod.metadata(server, settings, f"{server.name}-cache")
        claim.append(manifest("v1", "PersistentVolumeClaim", about, spec))
    if over.ray:
        running = pod_groups.ray_cluster(server, settings, over)
    elif over.nodes > 1:
        running = pod_groups.leader_worker_set(server, settings, over)
    else:
        running = _deployment(server, settings)
    return [*claim, running, service(server, settings, over), *_optional_objects(server, settings, over)]


def _optional_objects(
    server: ExportedServer, settings: pod.ClusterSettings, over: NodeSpread
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
        yield autoscaling.scaler_manifest(server, settings, over)
    if settings.network_policy:
        yield network_policy(server, settings, over)


def _head_remarks(server: ExportedServer, settings: pod.ClusterSettings, over: NodeSpread) -> Iterator[str]:
    """Head comments: what the cluster must offer for several nodes, a shared cache or autoscaling."""
    if over.nodes > 1:
        what = "KubeRay" if over.ray else f"LeaderWorkerSet {pod_groups.LEAST_VERSION} or newer"
        yield f"{over.nodes_sentence} It needs {what} in the cluster."
        without = "without one, NCCL sends over TCP between the nodes"
        yield f"No RDMA device is asked for, because each network names its own (rdma/...): {without}."
    if over.ray:
        yield from pod_groups.ray_image_remarks(server)
    elif over.nodes > 1:
        yield from pod_groups.leader_worker_set_remarks(server, settings)
    if settings.cache == "shared":
        yield "Its cache is one volume for all pods: the storage class must offer ReadWriteMany."
    if settings.scaler:
        yield from autoscaling.scaling_remarks(server, settings)


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


def service(server: ExportedServer, settings: pod.ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    """The Service of the pods that take requests: of a group over nodes, usually the first pod alone."""
    chosen = pod.pod_selector(server)
    if over.nodes > 1 and not over.answers_everywhere:
        chosen |= pod_groups.LEADER
    ports = [{"name": "http", "port": server.port, "targetPort": "http"}]
    return manifest("v1", "Service", pod.metadata(server, settings), {"selector": chosen, "ports": ports})


CLIENT = {"legroom.dev/vllm-client": "true"}
"""The label of client pods."""


def network_policy(server: ExportedServer, settings: pod.ClusterSettings, over: NodeSpread) -> dict[str, Any]:
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
    if over.nodes > 1:
        own = {"from": [{"podSelector": {"matchLabels": pod.pod_selector(server)}}]}
        rules.append(Commented("Ranks open ports of their own choice to each other.", own))
    spec = {"podSelector": {"matchLabels": pod.pod_selector(server)}, "policyTypes": ["Ingress"], "ingress": rules}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", pod.metadata(server, settings), spec)
