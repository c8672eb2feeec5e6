"""`legroom export kubernetes`: the planned server as a Deployment with its Service and the claim for its cache."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.drain import guard_drain, metrics_drain
from legroom.exports.deploy.paths import NamedPath, named_paths
from legroom.exports.deploy.server import ExportedServer, add_server_options
from legroom.exports.deploy.times import ENDPOINT_S, PROBE_PERIOD_S
from legroom.exports.deploy.words import API_KEY_NAME
from legroom.exports.deploy.yaml_text import Commented, yaml_text
from legroom.exports.request import ExportedFile
from legroom.units import GIB

if TYPE_CHECKING:
    from legroom.exports.request import ExportRequest

NAME = "kubernetes"
HELP = "a Deployment, its Service and the claim for its cache"
NEEDS_PLAN = True
_SECRET_KEYS = {"HF_TOKEN": "hf-token", API_KEY_NAME: "api-key", "LEGROOM_GUARD_TOKEN": "guard-token"}
_WATCH_MEMORY = "512Mi"
_MOST_BYTES = 900_000
"""A ConfigMap holds a megabyte in all; what is larger stays a file of the node."""
_OBJECTS = (("configmap", "files", False), ("secret generic", "certificates", True))
"""What holds the files of a pod: the command that makes it, its name, whether others must not read it."""


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group, image=True)
    group.add_argument("--namespace", metavar="NAME", help="where it goes (default: left to kubectl)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    server = containers.container_server(request)
    namespace = _namespace(request.options)
    created = (*secrets_created(server, namespace), *creating(server, namespace))
    remarks = (*containers.head(server), *server.remarks, *created)
    text = yaml_text(*manifests(server, namespace), head=remarks)
    return containers.with_dockerfile(server, ExportedFile(f"{server.name}.yaml", text))


def _namespace(options: Mapping[str, Any]) -> str | None:
    namespace: str | None = options.get("namespace")
    if namespace is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise LegroomError(f"--namespace {namespace!r} is not a name", "use lowercase letters, digits and dashes")
    return namespace


def manifests(server: ExportedServer, namespace: str | None) -> list[dict[str, Any]]:
    claim = [] if server.local_model else [_claim(server, namespace)]
    return [*claim, _deployment(server, namespace), _service(server, namespace)]


def _metadata(server: ExportedServer, namespace: str | None, name: str = "") -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": server.name}
    where = {"namespace": namespace} if namespace else {}
    return {"name": name or server.name, **where, "labels": labels}


def _selector(server: ExportedServer) -> dict[str, str]:
    return {"app.kubernetes.io/instance": server.name}


def _claim(server: ExportedServer, namespace: str | None) -> dict[str, Any]:
    checkpoint = server.host.checkpoint_bytes if server.host else 0
    # Room for a second revision of the small files, and for compiled code.
    size = math.ceil(checkpoint * 1.2 / GIB) + 10
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(server, namespace, f"{server.name}-cache"),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{size}Gi"}}},
    }


def _deployment(server: ExportedServer, namespace: str | None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "replicas": 1,
        "strategy": Commented("The new pod needs the cards and the volume of the old one.", {"type": "Recreate"}),
        "selector": {"matchLabels": _selector(server)},
        "template": {"metadata": _pod_metadata(server), "spec": _pod(server)},
    }
    if server.times:
        deadline_s = server.times.limit_s + 600
        spec["progressDeadlineSeconds"] = Commented("A rollout that is still loading is not late.", deadline_s)
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(server, namespace), "spec": spec}


def _pod_metadata(server: ExportedServer) -> dict[str, Any]:
    scrape = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(server.port),
        "prometheus.io/path": "/metrics",
    }
    if server.address.tls:
        scrape["prometheus.io/scheme"] = "https"
    return {"labels": _metadata(server, None)["labels"], "annotations": scrape}


def _pod(server: ExportedServer) -> dict[str, Any]:
    running = [_container(server)]
    if server.options.sidecar:
        running.append(_watch(server))
    pod: dict[str, Any] = {
        "enableServiceLinks": Commented(
            "A Service called vllm would set VLLM_PORT, which vLLM reads as its own.", False
        ),
    }
    if server.times:
        grace = _pre_stop_s(server) + server.times.stop_s
        why = f"preStop up to {_pre_stop_s(server)} s, then the drain and the teardown {server.times.stop_s} s."
        pod["terminationGracePeriodSeconds"] = Commented(why, grace)
    pod["tolerations"] = [{"key": containers.gpu_resource(server), "operator": "Exists", "effect": "NoSchedule"}]
    pod["containers"] = running
    pod["volumes"] = _volumes(server)
    return pod


def _container(server: ExportedServer) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "vllm",
        "image": containers.image(server),
        "command": [literal(word) for word in containers.entrypoint(server)],
        "args": [
            Commented(line.why, literal(word)) if i == 0 else literal(word)
            for line in server.lines
            for i, word in enumerate(line.phrase.words)
        ],
        "env": _environment(server),
        "ports": [{"name": "http", "containerPort": server.port}],
        "resources": _resources(server),
        **_probes(server),
        "lifecycle": {
            "preStop": Commented(_pre_stop_why(server), {"exec": {"command": ["/bin/sh", "-c", _pre_stop(server)]}})
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *_mounts(server), *file_mounts(server)],
    }
    if not container["env"]:
        del container["env"]
    return container


def literal(text: str) -> str:
    """Kubernetes puts variables into `$(NAME)` and makes one dollar of two, wherever they stand."""
    return text.replace("$", "$$")


def _environment(server: ExportedServer) -> list[Any]:
    lines: list[Any] = [
        Commented(f"{line.why}.", {"name": line.name, "value": literal(line.value)})
        for line in containers.container_env(server)
    ]
    for name in server.secrets:
        # A pod without its API key must not start: it would answer everybody.
        reference = {"name": server.name, "key": secret_key(name), "optional": name != API_KEY_NAME}
        lines.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return lines


def secret_key(name: str) -> str:
    """Where in the server's Secret a variable lies."""
    return _SECRET_KEYS.get(name) or "-".join(name.lower().split("_"))


def secrets_created(server: ExportedServer, namespace: str | None) -> Iterator[str]:
    """The command that makes the Secret with its keys and tokens."""
    if server.secrets:
        where = f" --namespace {namespace}" if namespace else ""
        literals = " ".join(f"--from-literal={secret_key(name)}=..." for name in server.secrets)
        yield f"Its secrets: kubectl create secret generic {server.name}{where} {literals}"


def _resources(server: ExportedServer) -> dict[str, Any]:
    cards = {containers.gpu_resource(server): server.gpus}
    host = server.host
    if host is None:
        return {"limits": cards}
    asked = {"cpu": host.cpus, "memory": f"{host.request_bytes // GIB}Gi", **cards}
    limit = f"The checkpoint ({host.checkpoint_bytes / GIB:.1f} GiB) fits into the page cache beside the rest."
    return {
        "requests": Commented(f"A core for each process that is always busy. {host.sentence()}.", asked),
        "limits": {"memory": Commented(limit, f"{host.limit_bytes // GIB}Gi"), **cards},
    }


def _probes(server: ExportedServer) -> dict[str, Any]:
    check = {"httpGet": {"path": "/health", "port": "http", **({"scheme": "HTTPS"} if server.address.tls else {})}}
    probes: dict[str, Any] = {
        "livenessProbe": Commented(
            "A minute without an answer: a busy event loop must not be taken for a dead server.",
            {**check, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 10, "failureThreshold": 6},
        ),
        "readinessProbe": {**check, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
    }
    if server.times:
        tries = server.times.limit_s // PROBE_PERIOD_S
        startup = {**check, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5, "failureThreshold": tries}
        probes = {"startupProbe": Commented(f"First start: {server.times.sentence()}.", startup), **probes}
    return probes


def _pre_stop(server: ExportedServer) -> str:
    if server.options.guard:
        return f"sleep {ENDPOINT_S}; {guard_drain(server)}"
    return f"sleep {ENDPOINT_S}" if server.drains_itself else metrics_drain(server)


def _pre_stop_why(server: ExportedServer) -> str:
    if server.options.guard:
        return "Routers learn that the pod is leaving; then the guard refuses new requests while running ones finish."
    if server.drains_itself:
        return "Routers learn that the pod is leaving; then vLLM drains by itself (--shutdown-timeout)."
    return f"vLLM {server.release.version} ends running requests at SIGTERM, so this waits for them first."


def _pre_stop_s(server: ExportedServer) -> int:
    drain = server.times.drain_s if server.times else 0
    if server.options.guard:
        return drain + ENDPOINT_S
    return ENDPOINT_S if server.drains_itself else ENDPOINT_S + drain


def _mounts(server: ExportedServer) -> list[dict[str, Any]]:
    if server.local_model:
        return model_mounts(server)
    return [{"name": "cache", "mountPath": "/root/.cache"}]


def _volumes(server: ExportedServer) -> list[Any]:
    size = f"{containers.shm_gib(server)}Gi"
    why = "Ranks communicate through /dev/shm, which has only 64 MiB by default. It counts as the container's memory."
    shm = Commented(why, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if server.local_model:
        own = [{"name": "legroom", "emptyDir": {}}] if server.options.sidecar else []
        return [shm, *model_volumes(server), *own, *file_volumes(server)]
    cache = {"name": "cache", "persistentVolumeClaim": {"claimName": f"{server.name}-cache"}}
    return [shm, cache, *file_volumes(server)]


def _watch(server: ExportedServer) -> dict[str, Any]:
    return {
        "name": "legroom-watch",
        "image": containers.image(server),
        "command": ["legroom", *server.address.watch_words()],
        "volumeMounts": [_journal(server)],
        "resources": {"requests": {"cpu": "100m", "memory": _WATCH_MEMORY}, "limits": {"memory": _WATCH_MEMORY}},
    }


def _journal(server: ExportedServer) -> dict[str, Any]:
    """In the claim, where there is one: incidents outlive the pod."""
    kept = {"name": "legroom"} if server.local_model else {"name": "cache", "subPath": "legroom"}
    return {**kept, "mountPath": containers.JOURNAL}


def _service(server: ExportedServer, namespace: str | None) -> dict[str, Any]:
    ports = [{"name": "http", "port": server.port, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(server, namespace),
        "spec": {"selector": _selector(server), "ports": ports},
    }


def _small(server: ExportedServer, *, private: bool) -> dict[str, NamedPath]:
    """The files that an object of the cluster holds, by their keys there."""
    by_key: dict[str, NamedPath] = {}
    for named in named_paths(server):
        if named.folder or named.private != private or Path(named.path).stat().st_size > _MOST_BYTES:
            continue
        key = re.sub(r"[^A-Za-z0-9._-]", "-", Path(named.path).name).lstrip(".") or "file"
        while key in by_key:
            key = f"other-{key}"
        by_key[key] = named
    return by_key


def _on_the_node(server: ExportedServer) -> list[NamedPath]:
    small = {named.path for private in (False, True) for named in _small(server, private=private).values()}
    return [named for named in named_paths(server) if named.path not in small]


def creating(server: ExportedServer, namespace: str | None) -> Iterator[str]:
    """The commands that make the objects which the pod reads its files from."""
    where = f" --namespace {namespace}" if namespace else ""
    for what, name, private in _OBJECTS:
        if files := _small(server, private=private):
            words = " ".join(f"--from-file={shlex.quote(f'{key}={named.path}')}" for key, named in files.items())
            yield f"Its {name}: kubectl create {what} {server.name}-{name}{where} {words}"


def file_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """Where the container sees them: by the path that the flag names."""
    mounts: list[dict[str, Any]] = []
    for _, name, private in _OBJECTS:
        for key, named in _small(server, private=private).items():
            mounts.append({"name": name, "mountPath": named.path, "subPath": key, "readOnly": True})
    for number, named in enumerate(_on_the_node(server)):
        mounts.append({"name": f"node-{number}", "mountPath": named.path, "readOnly": not named.writable})
    return mounts


def file_volumes(server: ExportedServer) -> list[Any]:
    """What they are mounted from."""
    volumes: list[Any] = []
    if _small(server, private=False):
        volumes.append({"name": "files", "configMap": {"name": f"{server.name}-files"}})
    if _small(server, private=True):
        volumes.append({"name": "certificates", "secret": {"secretName": f"{server.name}-certificates"}})
    for number, named in enumerate(_on_the_node(server)):
        kind = "File" if not named.folder else "DirectoryOrCreate" if named.writable else "Directory"
        volume = {"name": f"node-{number}", "hostPath": {"path": named.path, "type": kind}}
        volumes.append(Commented(f"{named.flag} names it, so it must exist on the node.", volume))
    return volumes


def model_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """Where the container sees a model that is a folder."""
    return [{"name": "model", "mountPath": server.model, "readOnly": True}]


def model_volumes(server: ExportedServer) -> list[Any]:
    """What it is mounted from."""
    return [Commented("The model is a folder of the node.", {"name": "model", "hostPath": {"path": server.model}})]
