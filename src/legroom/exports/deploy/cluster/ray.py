"""A server over several nodes as a RayCluster (ray.io/v1, KubeRay): the head runs `vllm serve`, and Ray its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from legroom.exports.deploy.cluster.leader_workers import LEADER, WORKER, with_role, without_watch
from legroom.exports.deploy.cluster.pod import container, metadata, pod_metadata, pod_spec, worker_container
from legroom.exports.deploy.yaml_text import Commented

if TYPE_CHECKING:
    from legroom.exports.deploy.cluster.nodes import NodeSpread
    from legroom.exports.deploy.cluster.settings import ClusterSettings
    from legroom.exports.deploy.server import ExportedServer

_NO_RAY_SINCE = "0.18.0"
"""requirements/cuda.txt lists ray up to 0.17.1, so vLLM's own images have it until then."""
_START = "eval ${KUBERAY_GEN_RAY_START_CMD/--block/}"
"""What KubeRay computed for the pod; without --block it leaves Ray running in the background."""


def ray_cluster(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    head = _head(server, settings, over)
    worker = worker_container(server, settings, ())
    worker |= {"command": ["/bin/bash", "-c", "eval $KUBERAY_GEN_RAY_START_CMD"], "args": [], **_own_probes()}
    others = {
        "groupName": "ranks",
        "replicas": over.nodes - 1,
        "minReplicas": over.nodes - 1,
        "maxReplicas": over.nodes - 1,
        "rayStartParams": {},
        "template": {
            "metadata": with_role(pod_metadata(server, scraped=False), WORKER),
            "spec": pod_spec(without_watch(server), settings, _addressed(worker)),
        },
    }
    about = metadata(server, settings)
    about["annotations"] = Commented(
        "The pods' own commands, into which KubeRay puts its `ray start`.", {"ray.io/overwrite-container-cmd": "true"}
    )
    group = {
        "rayStartParams": {"dashboard-host": "0.0.0.0"},
        "template": {
            "metadata": with_role(pod_metadata(server), LEADER),
            "spec": pod_spec(server, settings, _addressed(head)),
        },
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": about,
        "spec": {"headGroupSpec": group, "workerGroupSpecs": [others]},
    }


def _own_probes() -> dict[str, Any]:
    """KubeRay gives probes to pods that have none. Its own ask Ray's dashboard agent by wget: vLLM's images have no
    wget, and `ray[cgraph]` no agent, so the pod would be killed every ten minutes."""
    ends_with_ray = {"exec": {"command": ["/bin/true"]}}
    why = "The container ends with its raylet. KubeRay's own probe needs wget and Ray's dashboard in the image."
    return {"livenessProbe": Commented(why, ends_with_ray), "readinessProbe": ends_with_ray}


def _head(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    """It waits for the cards of the other nodes: vLLM gives up at once where Ray has too few."""
    cards = server.gpus * over.nodes
    wait = (
        "import ray, time; ray.init(address='auto', log_to_driver=False)\n"
        f"while ray.cluster_resources().get('GPU', 0) < {cards}: time.sleep(5)"
    )
    first = container(server, settings)
    command = first["command"]
    first["command"] = ["/bin/bash", "-c", f'{_START} && python3 -c "{wait}" && exec "$0" "$@"', *command]
    return first


def _addressed(first: dict[str, Any]) -> dict[str, Any]:
    address = {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    why = Commented("The address by which Ray's other nodes reach it.", address)
    return {**first, "env": [why, *first.get("env", [])]}


def image_remarks(server: ExportedServer) -> Iterator[str]:
    if server.release.at_least(_NO_RAY_SINCE) and server.options.image is None:
        yield (
            f"vLLM's own image has no Ray from {_NO_RAY_SINCE} on: build one with `pip install 'ray[cgraph]'` and name "
            "it with --image."
        )
