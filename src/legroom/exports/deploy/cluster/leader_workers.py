"""A server over several nodes as a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1): a group of pods that live and die
together, each of which knows the first one's name and its own place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.exports.deploy.cluster.pod import container, metadata, pod_metadata, pod_spec, worker_container
from legroom.exports.deploy.yaml_text import Commented

if TYPE_CHECKING:
    from legroom.exports.deploy.cluster.nodes import NodeSpread
    from legroom.exports.deploy.cluster.settings import ClusterSettings
    from legroom.exports.deploy.server import ExportedServer

LEADER = {"app.kubernetes.io/component": "leader"}
WORKER = {"app.kubernetes.io/component": "worker"}


def group_name(server: ExportedServer) -> str:
    """Not the server's own: the set makes a headless Service of its name, in which the pods find each other, and the
    server's Service has that name already."""
    return f"{server.name}-nodes"


def leader_worker_set(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    template = {
        "size": Commented("Pods of a group, one on each node.", over.nodes),
        "restartPolicy": Commented(
            "Ranks that lost one of them wait for it forever: the whole group starts anew.",
            "RecreateGroupOnPodRestart",
        ),
        "leaderTemplate": _leader(server, settings, over),
        "workerTemplate": _worker(server, settings, over),
    }
    replicas = {} if settings.scaler else {"replicas": settings.replicas}
    spec: dict[str, Any] = {
        **replicas,
        "startupPolicy": Commented(
            "All pods at once: the first becomes ready only when the others have joined it.", "LeaderCreated"
        ),
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": Commented(
                "One group after another, without spare nodes.", {"maxUnavailable": 1, "maxSurge": 0}
            ),
        },
        "leaderWorkerTemplate": template,
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(server, settings, group_name(server)),
        "spec": spec,
    }


def _leader(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    first = container(server, settings, over.leader_lines())
    return {"metadata": with_role(pod_metadata(server), LEADER), "spec": pod_spec(server, settings, first)}


def _worker(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    if over.answers_everywhere:
        first = container(server, settings, over.worker_lines(), over.worker_wrapper)
        about = pod_metadata(server)
        return {"metadata": with_role(about, WORKER), "spec": pod_spec(server, settings, first)}
    first = worker_container(server, settings, over.worker_lines(), over.worker_wrapper)
    spec = pod_spec(without_watch(server), settings, first)
    return {"metadata": with_role(pod_metadata(server, scraped=False), WORKER), "spec": spec}


def with_role(about: dict[str, Any], role: dict[str, str]) -> dict[str, Any]:
    return {**about, "labels": {**about["labels"], **role}}


def without_watch(server: ExportedServer) -> ExportedServer:
    """A pod without an HTTP server has nothing to watch."""
    return replace(server, options=replace(server.options, sidecar=False))
