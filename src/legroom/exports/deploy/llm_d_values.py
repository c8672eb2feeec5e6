"""`legroom export llm-d-values`: values for llm-d's chart `llm-d-modelservice`. Its keys are those of
charts/llm-d-modelservice/values.yaml (github.com/llm-d-incubation/llm-d-modelservice). All pods decode; a split into
prefill and decode needs a KV connector and a plan for each of the two."""

import argparse
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy import containers
from legroom.exports.deploy.cluster.pod import ClusterSettings, container, pod_spec, secret_command
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options
from legroom.exports.deploy.kubernetes import cluster_server
from legroom.exports.deploy.yaml_text import Commented, without_comments, yaml_text
from legroom.exports.export_request import ExportedFile, ExportRequest

NAME = "llm-d-values"
HELP = "values for the chart llm-d-modelservice (llm-d)"
NEEDS_PLAN = True


def add_options(group: argparse._ArgumentGroup) -> None:
    add_server_options(group, image=True)
    group.add_argument("--replicas", metavar="N", help="copies of the server (default: 1)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """A values file for llm-d's modelservice chart; LegroomError where the chart cannot hold the plan."""
    server, settings, over = cluster_server(request)
    if server.local_model or containers.needs_legroom(server):
        what = "a model in a folder" if server.local_model else "a guard or a sidecar"
        raise LegroomError(f"the chart has no place for {what}", "use legroom export kubernetes")
    if over.nodes > 1:
        hint = "use legroom export kubernetes"
        raise LegroomError("a server over several nodes is not exported for llm-d's chart", hint)
    remarks = (
        "Values for the chart llm-d-modelservice of llm-d.",
        *containers.head_comment(server),
        *server.remarks,
        *secret_command(server, None),
    )
    return (ExportedFile(f"{server.name}-llm-d-values.yaml", yaml_text(chart_values(server, settings), head=remarks)),)


def chart_values(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """The chart's values, with all replicas under `decode` and none for prefill."""
    artifacts = {
        "name": server.served_name,
        "uri": f"hf://{server.model}",
        "size": f"{containers.cache_gib(server)}Gi",
        "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": server.name},
    }
    proxy = Commented("Without a split into prefill and decode requests go to vLLM itself.", {"enabled": False})
    return {
        "fullnameOverride": server.name,
        "modelArtifacts": artifacts,
        "routing": {"servicePort": server.port, "proxy": proxy},
        "accelerator": {"type": containers.vendor(server)},
        "decode": _decode_section(server, settings),
        "prefill": {"create": False},
    }


def _decode_section(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    """The chart's `decode`: replicas, parallel sizes, and pod and container without the cache volume."""
    pod, first = pod_spec(server, settings), container(server, settings)
    first["volumeMounts"] = [mount for mount in first["volumeMounts"] if mount["name"] != "cache"]
    cache = {"name": "HF_HOME", "value": "/model-cache"}
    env = [Commented("Where the chart mounts its volume for the model.", cache), *first.pop("env", [])]
    main = {
        "name": first.pop("name"),
        "image": first.pop("image"),
        "modelCommand": Commented("The command as planned: the chart adds nothing to it.", "custom"),
        "mountModelVolume": True,
        **first,
        "env": env,
    }
    args = server.plan.args
    copies = int(args.get("data_parallel_size") or 1)
    sizes = {"tensor": int(args.get("tensor_parallel_size") or 1), "data": copies, "dataLocal": copies, "workers": 1}
    return {
        "create": True,
        "replicas": settings.replicas,
        "parallelism": sizes,
        "enableServiceLinks": pod["enableServiceLinks"],
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "containers": [main],
        "volumes": [volume for volume in pod["volumes"] if without_comments(volume)["name"] != "cache"],
    }
