"""Models of vLLM's production stack: entries of `modelSpec` in its chart's values."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.deployments.container_images import kubernetes_bytes
from legroom.deployments.kubernetes_reader import env_list, gpu_limit
from legroom.deployments.node_gpus import possible_gpus
from legroom.deployments.shell.lexer import Word
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node

_VALUES = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "pipelineParallelSize": "--pipeline-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
    "runner": "--runner",
    "convert": "--convert",
}
_SWITCHES = {"enableChunkedPrefill": "--enable-chunked-prefill", "enablePrefixCaching": "--enable-prefix-caching"}
"""Keys of `vllmConfig` in the chart's template deployment-vllm-multi.yaml."""


def is_model_spec(node: Node) -> bool:
    """Whether a mapping is an entry of `modelSpec`."""
    return bool(node.text("modelURL")) and any(
        node.get(key) is not None for key in ("vllmConfig", "requestGPU", "repository")
    )


def model_spec_server(node: Node) -> StartedServer:
    url = node.get("modelURL") or node
    repository, tag = node.text("repository"), node.text("tag")
    requested = node.text("requestGPU")
    place = node.source.place
    return StartedServer(
        "kubernetes",
        (Word("vllm", url.offset), Word("serve", url.offset), url.word(), *_flags(node)),
        env_list(node.get("env")),
        place,
        place(url.offset),
        image=f"{repository}:{tag}" if repository and tag else repository,
        in_container=True,
        shm="mounted",  # by the chart where there are several ranks
        gpus=gpu_limit(node) or (int(requested) if requested.isdecimal() and int(requested[:5]) else None),
        gpu_names=possible_gpus(node, node),
        memory_limit_bytes=kubernetes_bytes(node.text("limitMemory") or node.text("resources", "limits", "memory")),
        read_as="a model of vLLM's production stack",
    )


def _flags(node: Node) -> Iterator[Word]:
    settings = node.get("vllmConfig")
    for key, value in settings.items() if settings is not None else ():
        if value.scalar is None or value.scalar == "":
            continue
        if key in _VALUES:
            yield Word(f"{_VALUES[key]}={value.scalar}", value.offset)
        elif key in _SWITCHES:
            switch = _SWITCHES[key]
            yield Word(switch if value.scalar == "true" else switch.replace("--", "--no-", 1), value.offset)
    given = settings.get("extraArgs") if settings is not None else None
    yield from (item.word() for item in (given.list() if given is not None else ()) if item.scalar is not None)
    if node.text("enableLoRA") == "true":
        yield Word("--enable-lora", node.offset)
