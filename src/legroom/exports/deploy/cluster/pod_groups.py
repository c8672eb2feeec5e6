"""A server over several nodes: a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), or a RayCluster (ray.io/v1)."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legroom.exports.deploy.cluster.nodes import NodeSpread, headless
from legroom.exports.deploy.cluster.pod import ClusterSettings, claim_spec, container, metadata, pod_metadata, pod_spec
from legroom.exports.deploy.exported_server import ExportedServer
from legroom.exports.deploy.yaml_text import Commented, manifest

LEADER = {"app.kubernetes.io/component": "leader"}
WORKER = {"app.kubernetes.io/component": "worker"}

LEAST_VERSION = "0.8.0"
"""The first LeaderWorkerSet release with volumeClaimTemplates."""
_LONGEST_NAME = 46
"""A label has at most 63 characters; a StatefulSet of a group labels its pods with this name, the group's number (six
characters) and a hash of ten letters."""
_SUFFIX = "-nodes"


def group_name(server: ExportedServer) -> str:
    """The LeaderWorkerSet's name; not the server's, as the set creates a headless Service of its own name."""
    most = _LONGEST_NAME - len(_SUFFIX)
    if len(server.name) <= most:
        return f"{server.name}{_SUFFIX}"
    digest = hashlib.sha256(server.name.encode()).hexdigest()[:6]
    return f"{server.name[: most - 7].rstrip('-')}-{digest}{_SUFFIX}"


def leader_worker_set(server: ExportedServer, settings: ClusterSettings, spread: NodeSpread) -> dict[str, Any]:
    """The LeaderWorkerSet manifest of a server over several nodes: one pod per node, restarted as a group."""
    first = container(server, settings, spread.leader_flags())
    restart = "Ranks that lost one of them wait for it forever: the whole group starts anew."
    template: dict[str, Any] = {
        "size": Commented("Pods of a group, one on each node.", spread.nodes),
        "restartPolicy": Commented(restart, "RecreateGroupOnPodRestart"),
        "leaderTemplate": _pod_template(pod_metadata(server), LEADER, pod_spec(server, settings, first)),
        "workerTemplate": _worker_template(server, settings, spread),
    }
    if settings.cache == "kept" and not server.local_model:  # volumes outlive pods, so no restart downloads again
        claim = {"metadata": {"name": "cache"}, "spec": claim_spec(server, "ReadWriteOnce")}
        why = (
            "A volume for each pod, which it finds again when its group starts anew. They stay when the set is deleted."
        )
        template["volumeClaimTemplates"] = Commented(why, [claim])
    replicas = {} if settings.scaler else {"replicas": settings.replicas}
    together = "All pods at once: the first becomes ready only when the others have joined it."
    rollout = Commented("One group after another, without spare nodes.", {"maxUnavailable": 1, "maxSurge": 0})
    spec: dict[str, Any] = {
        **replicas,
        "startupPolicy": Commented(together, "LeaderCreated"),
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rollout},
        "leaderWorkerTemplate": template,
    }
    about = metadata(server, settings, group_name(server))
    return manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", about, spec)


def _worker_template(server: ExportedServer, settings: ClusterSettings, spread: NodeSpread) -> dict[str, Any]:
    """The pod template of all pods but the first."""
    is_open = spread.answers_everywhere
    started, watched = (server, server) if is_open else (headless(server), _without_watch(server))
    own = container(started, settings, spread.worker_flags(), spread.worker_shell_wrapper, takes_requests=is_open)
    about, spec = pod_metadata(server, scraped=is_open), pod_spec(watched, settings, own, takes_requests=is_open)
    return _pod_template(about, WORKER, spec)


def leader_worker_set_remarks(server: ExportedServer, settings: ClusterSettings) -> Iterator[str]:
    """Head comments: how to keep a group in one rack or network, and that its volumes outlive it."""
    yield (
        "To keep a group on nodes of one rack or network, annotate the set with "
        "leaderworkerset.sigs.k8s.io/exclusive-topology and the label by which your nodes tell it."
    )
    if settings.cache == "kept" and not server.local_model:
        where = f" --namespace {settings.namespace}" if settings.namespace else ""
        label = f"leaderworkerset.sigs.k8s.io/name={group_name(server)}"
        yield f"When it is deleted its volumes stay: kubectl delete pvc{where} -l {label}"


def _pod_template(metadata: dict[str, Any], role_label: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    """A pod template of this metadata, with `role_label` added to its labels, and the pod's spec."""
    return {"metadata": {**metadata, "labels": {**metadata["labels"], **role_label}}, "spec": spec}


def _without_watch(server: ExportedServer) -> ExportedServer:
    """The server without its `legroom watch` sidecar, for a pod that serves no HTTP."""
    return replace(server, options=replace(server.options, sidecar=False))


NO_RAY_SINCE = "0.18.0"  # requirements/cuda.txt lists ray up to 0.17.1, so vLLM's images contain it until then.
_START = "eval ${KUBERAY_GEN_RAY_START_CMD/--block/}"
"""KubeRay's `ray start` command of the pod; without --block it leaves Ray running in the background."""


def ray_cluster(server: ExportedServer, settings: ClusterSettings, spread: NodeSpread) -> dict[str, Any]:
    """The RayCluster manifest: vLLM runs on the head, and the other nodes are one worker group of fixed size."""
    # The container of the head, which waits for the GPUs of the other nodes: vLLM fails where Ray has too few.
    cards = server.gpus * spread.nodes
    wait = "import ray, time; ray.init(address='auto', log_to_driver=False)\n"
    wait += f"while ray.cluster_resources().get('GPU', 0) < {cards}: time.sleep(5)"
    head = container(server, settings)
    head["command"] = ["/bin/bash", "-c", f'{_START} && python3 -c "{wait}" && exec "$0" "$@"', *head["command"]]
    worker = container(server, settings, takes_requests=False)
    # KubeRay's default probes use wget and Ray's dashboard agent, which vLLM's images and `ray[cgraph]` lack, so
    # that the pod would be killed every ten minutes.
    ends_with_ray = {"exec": {"command": ["/bin/true"]}}
    why = "The container ends with its raylet. KubeRay's own probe needs wget and Ray's dashboard in the image."
    always_true_probes = {"livenessProbe": Commented(why, ends_with_ray), "readinessProbe": ends_with_ray}
    worker |= {"command": ["/bin/bash", "-c", "eval $KUBERAY_GEN_RAY_START_CMD"], "args": [], **always_true_probes}
    ranks = pod_spec(_without_watch(server), settings, _with_host_ip(worker), takes_requests=False)
    others = {
        "groupName": "ranks",
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), spread.nodes - 1),
        "rayStartParams": {},
        "template": _pod_template(pod_metadata(server, scraped=False), WORKER, ranks),
    }
    about = metadata(server, settings)
    why = "The pods' own commands, into which KubeRay puts its `ray start`."
    about["annotations"] = Commented(why, {"ray.io/overwrite-container-cmd": "true"})
    leader = pod_spec(server, settings, _with_host_ip(head))
    group = {
        "rayStartParams": {"dashboard-host": "0.0.0.0"},
        "template": _pod_template(pod_metadata(server), LEADER, leader),
    }
    return manifest("ray.io/v1", "RayCluster", about, {"headGroupSpec": group, "workerGroupSpecs": [others]})


def _with_host_ip(main_container: dict[str, Any]) -> dict[str, Any]:
    """A copy of the container with VLLM_HOST_IP set to the pod's IP, before its other variables."""
    address = {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    why = Commented("The address by which Ray's other nodes reach it.", address)
    return {**main_container, "env": [why, *main_container.get("env", [])]}
