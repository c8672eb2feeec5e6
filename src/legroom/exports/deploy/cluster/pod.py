"""The pod of a planned server: its container, probes, limits, volumes and end."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.exported_server import ExportedServer, commented_words, guard_drain, metrics_drain
from legroom.exports.deploy.named_paths import model_mounts, model_volumes, pod_files
from legroom.exports.deploy.serve_command import API_KEY_NAME, Phrase
from legroom.exports.deploy.start_times import ENDPOINT_S, PROBE_PERIOD_S
from legroom.exports.deploy.yaml_text import Commented, literal
from legroom.facts.gpus import GPU_ANNOTATION, gpu, gpu_of_labels
from legroom.records import dataclass
from legroom.sidecar import WATCH_PORT
from legroom.units import GIB, MIB

_SECRET_KEYS = {"HF_TOKEN": "hf-token", API_KEY_NAME: "api-key", "LEGROOM_GUARD_TOKEN": "guard-token"}
_WATCH_MEMORY = "512Mi"
_WATCH_FOLDER, _WATCH_FILE, _WATCH_VOLUME = "/etc/legroom", "watch.toml", "watch"
WATCH_PORT_NAME = "legroom"
DEFAULT_GPUS_PER_NODE = 8
USER_ID = 1000
NAMED_USER = Commented(
    "PyTorch names a folder by the user, who is in no list of the image.", {"name": "USER", "value": "vllm"}
)
READ_ONLY_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""The security context of a container under the Pod Security Standard `restricted`, with a read-only root."""


@dataclass(frozen=True)
class ClusterSettings:
    namespace: str | None = None
    replicas: int = 1
    most_replicas: int = 0
    """The maximum of autoscaling; 0: no autoscaling."""
    scaler: str = ""
    prometheus_url: str = ""
    """The Prometheus that KEDA queries."""
    cache: str = "claim"
    """`claim`: one volume for the only pod; `shared`: one that every pod writes to; `pod`: each pod has its own, which
    ends with it; `kept`: each pod of a LeaderWorkerSet has its own, which stays."""
    restricted: bool = False
    network_policy: bool = False
    gpus_per_node: int = DEFAULT_GPUS_PER_NODE

    @property
    def many_replicas(self) -> bool:
        """Whether more than one replica may run."""
        return max(self.replicas, self.most_replicas) > 1

    @property
    def own_volumes(self) -> bool:
        """Whether each new replica starts with an empty cache volume and downloads the weights."""
        return self.cache in ("pod", "kept")

    @property
    def home_folder(self) -> str:
        """$HOME in the container, which holds the caches of vLLM, PyTorch, Triton and FlashInfer."""
        return "/home/vllm" if self.restricted else "/root"


def pod_labels(server: ExportedServer) -> dict[str, str]:
    """The labels of the pods: app.kubernetes.io/name `vllm`, and the server's name as instance."""
    return {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": server.name}


def metadata(server: ExportedServer, settings: ClusterSettings, name: str = "") -> dict[str, Any]:
    """Name, namespace and labels of a Kubernetes object other than a pod; `name` defaults to the server's."""
    where = {"namespace": settings.namespace} if settings.namespace else {}
    return {"name": name or server.name, **where, "labels": pod_labels(server)}


def pod_selector(server: ExportedServer) -> dict[str, str]:
    """The matchLabels by which Services and controllers find the server's pods: the instance label alone."""
    return {"app.kubernetes.io/instance": server.name}


def pod_metadata(server: ExportedServer, *, scraped: bool = True) -> dict[str, Any]:
    """A pod's labels and annotations; `scraped`: also the prometheus.io annotations by which Prometheus finds it."""
    annotations = planned_gpu_note(server)
    if scraped:
        annotations |= {"prometheus.io/scrape": "true", "prometheus.io/port": str(server.port)}
        annotations["prometheus.io/path"] = "/metrics"
        if server.address.tls:
            annotations["prometheus.io/scheme"] = "https"
    return {"labels": pod_labels(server), **({"annotations": annotations} if annotations else {})}


def planned_gpu_note(server: ExportedServer) -> dict[str, Any]:
    """The annotation with the planned GPU's name, which `legroom gate` and `plan --file` read; {} without a GPU."""
    card = server.plan.gpu
    if not card.name:
        return {}
    try:
        name = gpu(card.name).name
    except LegroomError:
        name = f"{card.total_bytes // MIB}MiB"
    return {GPU_ANNOTATION: Commented("What it was planned for.", name)}


def node_selector(server: ExportedServer) -> dict[str, Any]:
    """The `nodeSelector` for the planned card by NVIDIA's GPU discovery label; {} for other cards and slices."""
    label = "nvidia.com/gpu.product"
    product = server.plan.gpu.name.replace(" ", "-")
    is_whole_card = re.match(r"(NVIDIA|Tesla|Quadro)-", product) and "mig" not in product.lower()
    if not is_whole_card or not gpu_of_labels({label: product}):
        return {}
    why = f"The planned card, as NVIDIA's GPU feature discovery labels nodes: kubectl get nodes -L {label}"
    return {"nodeSelector": Commented(why, {label: product})}


def pod_spec(
    server: ExportedServer,
    settings: ClusterSettings,
    main: dict[str, Any] | None = None,
    *,
    takes_requests: bool = True,
) -> dict[str, Any]:
    """The spec of a pod; `main`: its first container, by default vLLM's; `takes_requests` False: it serves no HTTP."""
    links = "A Service called vllm would set VLLM_PORT, which vLLM reads as its own."
    grace_s, hook_s = pre_stop_s(server) + server.times.stop_s, pre_stop_s(server, takes_requests=takes_requests)
    after = "the drain and the teardown" if hook_s == pre_stop_s(server) else "the teardown"
    grace = Commented(f"preStop up to {hook_s} s, then {after} {grace_s - hook_s} s.", grace_s)
    pod: dict[str, Any] = {"enableServiceLinks": Commented(links, False), "terminationGracePeriodSeconds": grace}
    if settings.restricted:
        pod["automountServiceAccountToken"] = Commented("It asks nothing of the API server.", False)
        pod["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": Commented("The volume of the cache belongs to it.", USER_ID),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    pod["tolerations"] = [{"key": containers.gpu_resource(server), "operator": "Exists", "effect": "NoSchedule"}]
    pod |= node_selector(server)
    sidecar = [_sidecar_container(server, settings)] if server.options.sidecar else []
    pod["containers"] = [main or container(server, settings), *sidecar]
    pod["volumes"] = _volumes(server, settings)
    return pod


def container(
    server: ExportedServer,
    settings: ClusterSettings,
    rank_flags: Sequence[Phrase] = (),
    shell_wrapper: str = "",
    *,
    takes_requests: bool = True,
) -> dict[str, Any]:
    """The vLLM container; `rank_flags`: those of its pod in a group; `shell_wrapper`: run with the command as "$@"."""
    why, pre_stop = _pre_stop_hook(server)
    if not takes_requests:
        why = "All pods of the group are told to end at once: this one stays while the first lets its requests finish, "
        why += "which need every rank."
        pre_stop = f"sleep {pre_stop_s(server, takes_requests=False)}"
    command = [literal(word) for word in containers.entrypoint(server)]
    if shell_wrapper:
        command = ["/bin/sh", "-c", literal(shell_wrapper), command[0], *command]
    # In `more` is a variable, `$(LWS_WORKER_INDEX)`.
    args = [*commented_words(server.phrases, literal), *commented_words(rank_flags, str)]
    program: dict[str, Any] = {"name": "vllm", "image": containers.image(server), "command": command, "args": args}
    if env := [*env_entries(server, settings, bool(rank_flags))]:
        program["env"] = env
    if settings.restricted:
        program["securityContext"] = READ_ONLY_CONTAINER
    return {
        **program,
        **({"ports": [{"name": "http", "containerPort": server.port}]} if takes_requests else {}),
        "resources": resource_requests(server),
        **(health_probes(server) if takes_requests else {}),
        "lifecycle": {"preStop": Commented(why, {"exec": {"command": ["/bin/sh", "-c", pre_stop]}})},
        "volumeMounts": _volume_mounts(server, settings),
    }


def env_entries(server: ExportedServer, settings: ClusterSettings, in_group: bool = False) -> Iterator[Any]:
    """The container's `env` entries; `in_group`: with VLLM_HOST_IP, by which other pods of the group reach it."""
    if settings.restricted:
        why = "Caches of vLLM, PyTorch, Triton and FlashInfer lie below it: the one place that can be written."
        yield Commented(why, {"name": "HOME", "value": settings.home_folder})
        yield NAMED_USER
    if in_group:
        address = {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        yield Commented("The address by which the other pods of the group reach it.", address)
    for line in containers.container_env(server):
        yield Commented(f"{line.why}.", {"name": line.name, "value": literal(line.value)})
    for name in server.secrets:
        # Without its API key the server would answer everybody, so the pod must not start.
        reference = {"name": server.name, "key": secret_key(name), "optional": name != API_KEY_NAME}
        yield {"name": name, "valueFrom": {"secretKeyRef": reference}}


def secret_key(name: str) -> str:
    """The key that holds the environment variable `name` in the server's Kubernetes Secret."""
    return _SECRET_KEYS.get(name) or "-".join(name.lower().split("_"))


def secret_command(server: ExportedServer, namespace: str | None) -> Iterator[str]:
    """A head comment with the kubectl command that creates the Secret; nothing without secrets."""
    if server.secrets:
        where = f" --namespace {namespace}" if namespace else ""
        literals = " ".join(f"--from-literal={secret_key(name)}=..." for name in server.secrets)
        yield f"Its secrets: kubectl create secret generic {server.name}{where} {literals}"


def resource_requests(server: ExportedServer) -> dict[str, Any]:
    """The container's `resources`: CPU, host memory and GPUs requested; memory and GPUs limited."""
    cards = {containers.gpu_resource(server): server.gpus}
    host = server.host
    asked = {"cpu": host.cpus, "memory": f"{host.request_bytes // GIB}Gi", **cards}
    checkpoint = f"the checkpoint ({host.checkpoint_bytes / GIB:.1f} GiB)"
    why = f"{host.request_bytes // GIB}Gi is enough; with this much {checkpoint} stays in the page cache, too."
    if host.limit_bytes == host.given_limit_bytes:
        why = "As given; what the page cache lacks is read from disk again."
    limits = {"memory": Commented(why, f"{host.limit_bytes // GIB}Gi"), **cards}
    busy = f"A core for each process that is always busy. {host.sentence()}."
    return {"requests": Commented(busy, asked), "limits": limits}


def one_pod_per_host(selector: dict[str, str]) -> dict[str, Any]:
    """A topology spread constraint: pods with these labels go to different hosts where there are enough."""
    where = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    return {**where, "labelSelector": {"matchLabels": selector}}


def health_probes(server: ExportedServer) -> dict[str, Any]:
    """Startup, liveness and readiness probes on /health; the startup probe lasts for the startup limit."""
    check = {"httpGet": {"path": "/health", "port": "http", **({"scheme": "HTTPS"} if server.address.tls else {})}}
    tries = server.times.limit_s // PROBE_PERIOD_S
    startup = {**check, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5, "failureThreshold": tries}
    alive = {**check, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 10, "failureThreshold": 6}
    why = "A minute without an answer: a busy event loop must not be taken for a dead server."
    return {
        "startupProbe": Commented(f"First start: {server.times.sentence()}.", startup),
        "livenessProbe": Commented(why, alive),
        "readinessProbe": {**check, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
    }


def _pre_stop_hook(server: ExportedServer) -> tuple[str, str]:
    """(Comment, shell line) of the preStop hook, which drains the server."""
    leaving = "Routers learn that the pod is leaving; then"
    if server.options.guard:
        why = f"{leaving} the guard refuses new requests while running ones finish."
        return why, f"sleep {ENDPOINT_S}; {guard_drain(server)}"
    if server.drains_itself:
        return f"{leaving} vLLM drains by itself (--shutdown-timeout).", f"sleep {ENDPOINT_S}"
    why = f"vLLM {server.release.version} ends running requests at SIGTERM, so this waits for them first."
    return why, metrics_drain(server)


def pre_stop_s(server: ExportedServer, *, takes_requests: bool = True) -> int:
    """Most seconds of the preStop hook; unless the pod `takes_requests`, it includes vLLM's own drain time, if any."""
    drains_here = server.options.guard or not server.drains_itself
    return ENDPOINT_S + server.times.drain_s * (drains_here + (server.drains_itself and not takes_requests))


def _volume_mounts(server: ExportedServer, settings: ClusterSettings) -> list[dict[str, Any]]:
    """The vLLM container's mounts: /dev/shm, the model's folder or the cache, /tmp if restricted, named files."""
    shm = {"name": "shm", "mountPath": "/dev/shm"}
    cache = {"name": "cache", "mountPath": settings.home_folder if settings.restricted else "/root/.cache"}
    tmp = [{"name": "tmp", "mountPath": "/tmp"}] if settings.restricted else []
    return [shm, *(model_mounts(server) or [cache]), *tmp, *pod_files(server).mounts]


def _volumes(server: ExportedServer, settings: ClusterSettings) -> list[Any]:
    """Pod volumes: shm, model folder or cache (none if it is `kept`), tmp if restricted, sidecar, files in flags."""
    size = f"{containers.shm_gib(server)}Gi"
    why = "Ranks communicate through /dev/shm, which has only 64 MiB by default. It counts as the container's memory."
    shm = Commented(why, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    more: list[Any] = [{"name": "tmp", "emptyDir": {}}] if settings.restricted else []
    if server.options.sidecar:
        more.append({"name": _WATCH_VOLUME, "configMap": {"name": f"{server.name}-watch"}})
    if server.local_model:
        own = [{"name": "legroom", "emptyDir": {}}] if server.options.sidecar else []
        return [shm, *model_volumes(server), *own, *more, *pod_files(server).volumes]
    if settings.cache == "pod":
        template = {"spec": claim_spec(server, "ReadWriteOnce")}
        volume = {"name": "cache", "ephemeral": {"volumeClaimTemplate": template}}
        why = "A volume for each pod: it downloads the model again when it starts on a new one."
        more.insert(0, Commented(why, volume))
    elif settings.cache != "kept":  # a LeaderWorkerSet has its own claim templates
        more.insert(0, {"name": "cache", "persistentVolumeClaim": {"claimName": f"{server.name}-cache"}})
    return [shm, *more, *pod_files(server).volumes]


def claim_spec(server: ExportedServer, access_mode: str) -> dict[str, Any]:
    """The spec of a PersistentVolumeClaim for the weights' cache; `access_mode` such as ReadWriteOnce."""
    return {"accessModes": [access_mode], "resources": {"requests": {"storage": f"{containers.cache_gib(server)}Gi"}}}


def _sidecar_container(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """The container of `legroom watch --daemon` beside the server."""
    config = {"name": _WATCH_VOLUME, "mountPath": _WATCH_FOLDER, "readOnly": True}
    watch: dict[str, Any] = {
        "name": "legroom-watch",
        "image": containers.image(server),
        "command": ["legroom", "watch", "--daemon", "--config", f"{_WATCH_FOLDER}/{_WATCH_FILE}"],
        "ports": [Commented("Its /metrics.", {"name": WATCH_PORT_NAME, "containerPort": WATCH_PORT})],
        "volumeMounts": [_journal_mount(server, settings), config],
        "resources": {"requests": {"cpu": "100m", "memory": _WATCH_MEMORY}, "limits": {"memory": _WATCH_MEMORY}},
    }
    if settings.restricted:
        watch["env"] = [{"name": "HOME", "value": settings.home_folder}]
        watch["securityContext"] = READ_ONLY_CONTAINER
    return watch


def sidecar_config_map(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """The ConfigMap with the sidecar's watch.toml, in which it listens on all addresses for Prometheus to reach it."""
    lines = ['host = "0.0.0.0"', "", "[[servers]]", f'url = "{server.address.url}"']
    if server.address.tls:
        lines.append("verify_tls = false")
    about = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(server, settings, f"{server.name}-watch")}
    return {**about, "data": {_WATCH_FILE: "\n".join(lines) + "\n"}}


def _journal_mount(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """The volume mount of the sidecar's journal, in the cache volume where there is one: incidents outlive the pod."""
    journal = {"mountPath": containers.JOURNAL.replace("/root", settings.home_folder, 1)}
    if server.local_model:
        return {"name": "legroom", **journal}
    # Pods that share a volume must not share a journal.
    path = {"subPathExpr": "legroom/$(HOSTNAME)"} if settings.cache == "shared" else {"subPath": "legroom"}
    return {"name": "cache", **path, **journal}
