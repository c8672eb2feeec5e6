"""`legroom export kserve`: the planned server as an LLMInferenceService (serving.kserve.io/v1alpha2).

KServe's own templates start vLLM (0.20.0, config/llmisvcconfig): they name the model's folder, the port, the
certificates and the tensor-parallel size, and put the container's args behind, through one more shell. What they say is
left out here; what they cannot know is said.
"""

import argparse
import shlex
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.cluster import pod
from legroom.exports.deploy.cluster.nodes import NodeSpread, headless
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, commented_words
from legroom.exports.deploy.kubernetes import cluster_server
from legroom.exports.deploy.start_times import PROBE_PERIOD_S
from legroom.exports.deploy.yaml_text import Commented, literal, manifest, yaml_text
from legroom.exports.export_request import ExportedFile, ExportRequest

NAME = "kserve"
HELP = "an LLMInferenceService of KServe"
NEEDS_PLAN = True
_BY_KSERVE = frozenset(
    {
        *("--host", "--port", "--served-model-name", "--tensor-parallel-size", "--ssl-certfile", "--ssl-keyfile"),
        "--shutdown-timeout",
    }
)
_IN_PARALLELISM = frozenset(
    {"--data-parallel-size", "--data-parallel-size-local", "--enable-expert-parallel", "--data-parallel-rpc-port"}
)
"""Flags that KServe's template of several nodes writes itself."""

_DOWNLOADER = "storage-initializer"
_DOWNLOADING = frozenset({"HF_TOKEN"})  # Variables of the container that downloads the model.
_PRE_STOP_S, _END_S = 15, 5
"""Seconds of the grace period that the template does not give to the drain (config_merge.go)."""


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group, image=True)
    group.add_argument("--namespace", metavar="NAME", help="where it goes (default: left to kubectl)")
    group.add_argument("--replicas", metavar="N", help="copies of the server (default: 1)")
    group.add_argument("--gpus-per-node", metavar="N", help="cards of one node (default: 8)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """One file with an LLMInferenceService; LegroomError where KServe cannot run the plan."""
    server, settings, over = cluster_server(request)
    if server.local_model:
        raise LegroomError(f"{server.model} is a folder, and KServe fetches the model itself", "name a Hub id")
    if containers.needs_legroom(server):
        raise LegroomError("KServe's template has no place for a guard or a sidecar", "use legroom export kubernetes")
    if over.ray or (over.nodes > 1 and not over.engines_per_node):
        hint = "use legroom export kubernetes, or data parallelism over the nodes"
        raise LegroomError("ranks of one copy over several nodes are not exported for KServe", hint)
    if over.answers_everywhere:
        why = "KServe's template starts all nodes but the first with --headless: only the first takes requests"
        hint = "leave out --data-parallel-hybrid-lb and the like, or use legroom export kubernetes"
        raise LegroomError(why, hint)
    remarks = (*containers.head_comment(server), *server.remarks, *pod.secret_command(server, settings.namespace))
    template, args = _pod_template(server, settings, over), server.plan.args
    sizes: dict[str, Any] = {"tensor": int(args.get("tensor_parallel_size") or 1)}
    if over.nodes > 1:
        sizes |= {"data": over.nodes * over.engines_per_node, "dataLocal": over.engines_per_node}
        sizes |= {"expert": True} if args.get("enable_expert_parallel") else {}
    spec: dict[str, Any] = {
        "model": {"uri": f"hf://{server.model}", "name": server.served_name},
        "replicas": settings.replicas,
        "parallelism": sizes,
        "router": {"route": {}, "gateway": {}, "scheduler": {}},
        "template": template,
    }
    if over.nodes > 1:
        spec["worker"] = _pod_template(headless(server), settings, over)
    about = {**pod.metadata(server, settings), "annotations": pod.planned_gpu_note(server)}
    text = yaml_text(manifest("serving.kserve.io/v1alpha2", "LLMInferenceService", about, spec), head=remarks)
    return (ExportedFile(f"{server.name}-llmisvc.yaml", text),)


def _pod_template(server: ExportedServer, settings: pod.ClusterSettings, spread: NodeSpread) -> dict[str, Any]:
    """The pod spec for the LLMInferenceService's `template` or `worker`; KServe merges its container with its own."""
    left_out = _BY_KSERVE | (_IN_PARALLELISM if spread.nodes > 1 else frozenset())
    flags = (phrase for phrase in server.phrases if phrase.flag not in left_out)
    main: dict[str, Any] = {
        "name": "main",
        "image": containers.image(server),
        "args": [*commented_words(flags, lambda word: literal(shlex.quote(word)))],
        "resources": pod.resource_requests(server),
    }
    fetching, serving = (
        tuple(name for name in server.secrets if (name in _DOWNLOADING) == used) for used in (True, False)
    )
    downloading = [*pod.env_entries(replace(server, env=(), secrets=fetching), settings)]
    env = [*pod.env_entries(replace(server, secrets=serving), settings)]
    if server.options.image is None:
        why = "The template refuses root, which vLLM's image would run as."
        main["securityContext"] = Commented(why, {"runAsUser": pod.USER_ID, "runAsGroup": pod.USER_ID})
        env.insert(0, pod.NAMED_USER)
    if env:
        main["env"] = env
    probe = {"periodSeconds": PROBE_PERIOD_S, "failureThreshold": server.times.limit_s // PROBE_PERIOD_S}
    main["startupProbe"] = Commented(f"First start: {server.times.sentence()}.", probe)
    template: dict[str, Any] = {}
    if server.drains_itself:
        why = f"{_PRE_STOP_S} s of preStop, the drain, and {_END_S} s that the template keeps back."
        template["terminationGracePeriodSeconds"] = Commented(why, _PRE_STOP_S + server.times.drain_s + _END_S)
    if downloading:
        downloader = {"name": _DOWNLOADER, "env": downloading}
        template["initContainers"] = [Commented("It fetches the model, before vLLM starts.", downloader)]
    template["containers"] = [main]
    memory = {"medium": "Memory", "sizeLimit": f"{containers.shm_gib(server)}Gi"}
    why = "In place of the template's own size: ranks communicate through /dev/shm."
    template["volumes"] = [Commented(why, {"name": "dshm", "emptyDir": memory})]
    return template
