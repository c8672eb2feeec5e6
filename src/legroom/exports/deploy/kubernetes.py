"""`legroom export kubernetes`: a Deployment or a group of pods, with Service, volumes, scaling and policies."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.cluster import autoscaling, pod_groups
from legroom.exports.deploy.cluster.cluster_settings import ClusterSettings, add_cluster_options, cluster_settings
from legroom.exports.deploy.cluster.nodes import NodeSpread, server_of_node, spread
from legroom.exports.deploy.cluster.pod import (
    WATCH_PORT_NAME,
    check_restricted,
    claim_spec,
    metadata,
    pod_metadata,
    pod_spec,
    secrets_created,
    selector,
    watch_settings,
)
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options
from legroom.exports.deploy.flag_comments import WRITTEN
from legroom.exports.deploy.named_paths import creating, on_the_node
from legroom.exports.deploy.yaml_text import Commented, manifest, yaml_text
from legroom.exports.export_request import ExportedFile

if TYPE_CHECKING:
    from legroom.exports.deploy.cluster.cluster_settings import ClusterSettings
    from legroom.exports.deploy.cluster.nodes import NodeSpread
    from legroom.exports.deploy.exported_server import ExportedServer
    from legroom.exports.export_request import ExportRequest

NAME = "kubernetes"
HELP = "a Deployment (a LeaderWorkerSet or RayCluster where it spans nodes), its Service and the claim for its cache"
NEEDS_PLAN = True
_ADAPTER = "Helm values for prometheus-adapter: the metrics that the HorizontalPodAutoscaler reads."


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group, image=True)
    add_cluster_options(group)


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    server, settings, over = cluster_server(request)
    created = (*secrets_created(server, settings.namespace), *creating(server, settings.namespace))
    remarks = (*containers.head(server), *_remarks(server, settings, over), *server.remarks, *created)
    text = yaml_text(*manifests(server, settings, over), head=remarks)
    made = containers.with_dockerfile(server, ExportedFile(f"{server.name}.yaml", text))
    if settings.scaler == "hpa":
        values = yaml_text(autoscaling.adapter_values(server, settings), head=(_ADAPTER, WRITTEN))
        made = (ExportedFile(f"{server.name}-adapter-values.yaml", values), *made)
    return made


def cluster_server(request: ExportRequest) -> tuple[ExportedServer, ClusterSettings, NodeSpread]:
    """The server of a request with the flags and GPUs of one node, the settings and its nodes."""
    plan, over = spread(request.needed_plan, cluster_settings(request.options).gpus_per_node)
    server = server_of_node(containers.container_server(replace(request, plan=plan)), over, plan.args)
    settings = cluster_settings(request.options, over.nodes, keeps_volumes=over.nodes > 1 and not over.ray)
    if settings.restricted:
        check_restricted(server, on_the_node(server))
    if over.ray and settings.several:
        raise LegroomError(
            "a RayCluster is one server, and several replicas were asked for",
            "export it again under another --name, or use --nnodes in place of Ray",
        )
    return server, settings, over


def manifests(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> list[dict[str, Any]]:
    with_claim = not server.local_model and not settings.own_volumes
    claim = [_claim(server, settings)] if with_claim else []
    if over.ray:
        running = pod_groups.ray_cluster(server, settings, over)
    elif over.nodes > 1:
        running = pod_groups.leader_worker_set(server, settings, over)
    else:
        running = _deployment(server, settings)
    return [*claim, running, service(server, settings, over), *_beside(server, settings, over)]


def _beside(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> Iterator[dict[str, Any]]:
    if server.options.sidecar:
        yield watch_settings(server, settings)
    if settings.several:
        yield disruption_budget(server, settings)
    if settings.scaler:
        yield autoscaling.scaler(server, settings, over)
    if settings.network_policy:
        yield network_policy(server, settings, over)


def _remarks(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> Iterator[str]:
    if over.nodes > 1:
        what = "KubeRay" if over.ray else f"LeaderWorkerSet {pod_groups.LEAST_VERSION} or newer"
        yield f"{over.total_sentence} It needs {what} in the cluster."
        yield (
            "No RDMA device is asked for, because each network names its own (rdma/...): without one, NCCL sends over "
            "TCP between the nodes."
        )
    if over.ray:
        yield from pod_groups.image_remarks(server)
    elif over.nodes > 1:
        yield from pod_groups.remarks(server, settings)
    if settings.cache == "shared":
        yield "Its cache is one volume for all pods: the storage class must offer ReadWriteMany."
    if settings.scaler:
        yield from autoscaling.remarks(server, settings)


def _claim(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    return manifest(
        "v1",
        "PersistentVolumeClaim",
        metadata(server, settings, f"{server.name}-cache"),
        claim_spec(server, "ReadWriteMany" if settings.cache == "shared" else "ReadWriteOnce"),
    )


def _deployment(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    if settings.several:
        rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
        strategy = Commented("One after another, without spare cards: the others serve meanwhile.", rolling)
    else:
        strategy = Commented("The new pod needs the cards and the volume of the old one.", {"type": "Recreate"})
    replicas = {} if settings.scaler else {"replicas": settings.replicas}
    spec: dict[str, Any] = {
        **replicas,
        "strategy": strategy,
        "selector": {"matchLabels": selector(server)},
        "template": {
            "metadata": pod_metadata(server),
            "spec": {**pod_spec(server, settings), **_apart(server, settings)},
        },
    }
    deadline_s = server.times.limit_s * (settings.replicas if settings.several else 1) + 600
    spec["progressDeadlineSeconds"] = Commented("A rollout that is still loading is not late.", deadline_s)
    return manifest("apps/v1", "Deployment", metadata(server, settings), spec)


def _apart(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """Spread replicas over nodes."""
    if not settings.several:
        return {}
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(server)},
    }
    why = "On nodes of their own where there are enough: one that fails takes one replica."
    return {"topologySpreadConstraints": Commented(why, [constraint])}


def service(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    """The Service of the pods that receive requests."""
    chosen = selector(server)
    if over.nodes > 1 and not over.answers_everywhere:
        chosen |= pod_groups.LEADER
    ports = [{"name": "http", "port": server.port, "targetPort": "http"}]
    return manifest("v1", "Service", metadata(server, settings), {"selector": chosen, "ports": ports})


CLIENT = {"legroom.dev/vllm-client": "true"}
"""The label of client pods."""


def disruption_budget(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    why = (
        "A drained node takes one pod; the next is taken when that one serves again. A group counts as one: all of its "
    )
    why += "pods leave and come back together."
    spec = {"maxUnavailable": Commented(why, 1), "selector": {"matchLabels": selector(server)}}
    return manifest("policy/v1", "PodDisruptionBudget", metadata(server, settings), spec)


def network_policy(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    """Ingress from labelled clients, from Prometheus and among the pods of a group."""
    ports = [{"port": "http"}]
    scraped = [*ports, {"port": WATCH_PORT_NAME}] if server.options.sidecar else ports
    clients = [{"podSelector": {"matchLabels": CLIENT}}, {"namespaceSelector": {"matchLabels": CLIENT}}]
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    what = "the guard, which is asked before the pool" if server.options.guard else "the server"
    rules: list[Any] = [
        Commented(
            f"Pods with this label, or all of a namespace with it, reach {what}. Its /-/legroom/ paths need the token "
            "as well."
            if server.options.guard
            else f"Pods with this label, or all of a namespace with it, reach {what}.",
            {"from": clients, "ports": ports},
        ),
        Commented("Prometheus, in the namespace that it usually has.", {"from": monitoring, "ports": scraped}),
    ]
    if over.nodes > 1:
        own = {"from": [{"podSelector": {"matchLabels": selector(server)}}]}
        rules.append(Commented("Ranks open ports of their own choice to each other.", own))
    spec = {"podSelector": {"matchLabels": selector(server)}, "policyTypes": ["Ingress"], "ingress": rules}
    return manifest("networking.k8s.io/v1", "NetworkPolicy", metadata(server, settings), spec)
