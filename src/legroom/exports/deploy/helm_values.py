"""`legroom export helm-values`: values for the chart `vllm-stack` of vLLM's production stack. Its keys are those of
chart version 0.1.12 (github.com/vllm-project/production-stack, helm/values.yaml). What the chart has no key for is
named in comments instead of being left out silently."""

from dataclasses import replace
from functools import partial
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.cluster.pod import ClusterSettings, env_entries, secret_command, secret_key
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, commented_words
from legroom.exports.deploy.named_paths import model_mounts, model_volumes, pod_files
from legroom.exports.deploy.serve_command import API_KEY_NAME, Phrase
from legroom.exports.deploy.start_times import PROBE_PERIOD_S
from legroom.exports.deploy.yaml_text import Commented, literal, yaml_text
from legroom.exports.export_request import ExportedFile, ExportRequest
from legroom.facts.flags import flags_of
from legroom.units import GIB

NAME = "helm-values"
HELP = "values for the chart vllm-stack (vLLM production stack)"
NEEDS_PLAN = True
add_options = partial(add_server_options, image=True)
CHART = "vllm-stack 0.1.12 (vLLM production stack)"
_GRACE_S = 30  # Kubernetes' default: the chart has no key for terminationGracePeriodSeconds.
_TEARDOWN_S = 10
_KEYS = {
    "--max-model-len": ("maxModelLen", int),
    "--dtype": ("dtype", str),
    "--tensor-parallel-size": ("tensorParallelSize", int),
    "--max-num-seqs": ("maxNumSeqs", int),
    "--gpu-memory-utilization": ("gpuMemoryUtilization", float),
    "--max-loras": ("maxLoras", int),
    "--runner": ("runner", str),
    "--convert": ("convert", str),
}
"""Flags that the chart has keys for; every other one goes into extraArgs."""
_MOST = 999_999  # Helm reads numbers as floats and writes a million as 1e+06; extraArgs are texts.
_OWN = frozenset(
    [
        *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill"),
        *("--no-enable-chunked-prefill", "--enable-lora", "--host", "--port"),
    ]
)
"""Flags that the chart writes by keys of their own."""


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """A values file for the chart of vLLM's production stack; LegroomError where the chart cannot hold the plan."""
    server = containers.container_server(request)
    if server.address.tls:
        hint = "leave out --ssl-*, or use legroom export kubernetes"
        raise LegroomError("the router of the chart speaks plain http to its servers", hint)
    if containers.needs_legroom(server):
        hint = "use legroom export kubernetes, or leave them out"
        raise LegroomError("the chart has no place for legroom: a guard, a sidecar or LEGROOM_WORKER_MEMORY", hint)
    flag = flags_of(server.release).get("--enable-prefix-caching")
    if server.words.head[-1] != "serve" or flag is None or (flag.kind != "bool" and not _has_prefix_caching(server)):
        why = f"the chart writes --no-enable-prefix-caching, which vLLM {server.release} does not take"
        raise LegroomError(why, "use legroom export kubernetes, or a release from 0.8.5 on")
    remarks = (
        f"Values for the chart {CHART}.",
        *containers.head_comment(server),
        *server.remarks,
        *secret_command(server, None),
        *pod_files(server).commands,
        f"The chart has no key for the grace period, so Kubernetes' {_GRACE_S} s apply, and the drain is shorter.",
    )
    return (ExportedFile(f"{server.name}-values.yaml", yaml_text(chart_values(server), head=remarks)),)


def chart_values(server: ExportedServer) -> dict[str, Any]:
    """The chart's `servingEngineSpec`: one model, its API key secret, startup and liveness probes."""
    spec: dict[str, Any] = {"containerPort": server.port, "modelSpec": [_model_spec(server)]}
    if API_KEY_NAME in server.secrets:
        keys = {"secretName": server.name, "secretKey": secret_key(API_KEY_NAME)}
        spec["vllmApiKey"] = Commented("A secret that exists in the cluster.", keys)
    tries, check = -(-server.times.limit_s // PROBE_PERIOD_S), {"path": "/health", "port": server.port}
    startup = {"periodSeconds": PROBE_PERIOD_S, "failureThreshold": tries, "httpGet": check, "initialDelaySeconds": 15}
    alive = {"periodSeconds": PROBE_PERIOD_S, "failureThreshold": 6, "httpGet": check, "timeoutSeconds": 10}
    spec["startupProbe"] = Commented(f"First start: {server.times.sentence()}.", startup)
    spec["livenessProbe"] = alive
    return {"servingEngineSpec": spec}


def _model_spec(server: ExportedServer) -> dict[str, Any]:
    """The chart's entry of the model: image, replicas, resources, vLLM flags and environment."""
    image, host, cards = containers.image(server), server.host, {containers.gpu_resource(server): server.gpus}
    repository, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:  # a colon before a slash belongs to a port
        repository, tag = image, "latest"
    memory = Commented(f"{host.sentence()}.", f"{host.request_bytes // GIB}Gi")
    model: dict[str, Any] = {
        "name": server.name,
        "repository": repository,
        "tag": tag,
        "modelURL": server.model,
        "replicaCount": 1,
        "resources": {
            "requests": {"cpu": host.cpus, "memory": memory, **cards},
            "limits": {"memory": f"{host.limit_bytes // GIB}Gi", **cards},
        },
        "shmSize": f"{containers.shm_gib(server)}Gi",
        "vllmConfig": _chart_vllm_config(server),
    }
    # The chart has a key of its own for the API key. Its own for HF_TOKEN would keep a pod waiting for a secret that
    # only gated models need.
    others = tuple(name for name in server.secrets if name != API_KEY_NAME)
    if env := [*env_entries(replace(server, secrets=others), ClusterSettings())]:
        model["env"] = env
    if server.words.get("--enable-lora"):
        model["enableLoRA"] = True
    files = pod_files(server)
    if mounts := [*model_mounts(server), *files.mounts]:
        model["extraVolumeMounts"] = mounts
        model["extraVolumes"] = [*model_volumes(server), *files.volumes]
    if not server.local_model:
        model["pvcStorage"] = f"{containers.cache_gib(server)}Gi"
    return model


def _chart_vllm_config(server: ExportedServer) -> dict[str, Any]:
    """The chart's `vllmConfig`: flags that it has a key for, and the others as `extraArgs`."""
    config: dict[str, Any] = {
        "enablePrefixCaching": Commented("The chart turns it off unless told otherwise.", _has_prefix_caching(server)),
        "tensorParallelSize": Commented("The chart mounts /dev/shm only if this is set.", 1),
    }
    chunked = server.words.get("--enable-chunked-prefill")
    if chunked or server.words.get("--no-enable-chunked-prefill"):
        config["enableChunkedPrefill"] = chunked is not None
    extra: list[Any] = []
    for phrase in server.phrases:
        value = _chart_value(phrase)
        if value is not None:
            config[_KEYS[phrase.flag][0]] = Commented(phrase.why, value)
        elif phrase.flag == "--shutdown-timeout":
            drain = min(server.times.drain_s, _GRACE_S - _TEARDOWN_S)
            extra += [Commented(phrase.why, phrase.flag), str(drain)]
        elif phrase.flag not in _OWN:
            extra += commented_words([phrase], literal)
    if extra:
        config["extraArgs"] = extra
    return config


def _chart_value(phrase: Phrase) -> str | int | float | None:
    """The flag's value for the chart's own key; None where the chart has no key or cannot hold it (32k, auto)."""
    if phrase.flag not in _KEYS or len(phrase.values) != 1:
        return None
    try:
        value: str | int | float = _KEYS[phrase.flag][1](phrase.value)
    except ValueError:
        return None
    return None if isinstance(value, int) and not 0 <= value <= _MOST else value


def _has_prefix_caching(server: ExportedServer) -> bool:
    return bool(server.plan.args.get("enable_prefix_caching"))
