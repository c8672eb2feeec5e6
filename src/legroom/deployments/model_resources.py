"""Resources that name a model and leave the pod to their controller: KServe's LLMInferenceService, KubeAI's Model."""

from __future__ import annotations

from collections.abc import Iterator

from legroom.deployments.containers import bytes_of
from legroom.deployments.kubeai import kubeai_server, names_model, serve_words
from legroom.deployments.kubernetes import added_words, cards, list_env, start_limit
from legroom.deployments.node_gpus import GPU_ANNOTATION, gpus_named
from legroom.deployments.shell.scan import Word
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node

_PARALLEL = (
    ("tensor", "--tensor-parallel-size"),
    ("pipeline", "--pipeline-parallel-size"),
    ("data", "--data-parallel-size"),
    ("dataLocal", "--data-parallel-size-local"),
)
"""Of `spec.parallelism`: what KServe's own template makes of it."""
_MAIN = "main"
"""The container of an LLMInferenceService that runs vLLM."""
_MOUNTED = "mounted"
"""KServe's own templates (config/llmisvcconfig) mount a /dev/shm into it."""


def model_resource(document: Node) -> Iterator[StartedServer]:
    """The servers that the resource's controller will start; none for any other resource."""
    kind, group = document.text("kind"), document.text("apiVersion").partition("/")[0]
    if kind == "LLMInferenceService" and group == "serving.kserve.io":
        yield from _llm_inference_service(document)
    elif kind == "Model" and group == "kubeai.org":
        yield from _kubeai_model(document)


def _llm_inference_service(document: Node) -> Iterator[StartedServer]:
    spec = document.get("spec")
    uri = document.get("spec", "model", "uri")
    if spec is None or uri is None:
        return
    for workload in (spec, spec.get("prefill")):
        if workload is not None and (workload is spec or workload.values):
            server = _workload(document, workload, uri)
            if server is not None:
                yield server


def _workload(document: Node, workload: Node, uri: Node) -> StartedServer | None:
    pod = workload.get("template") or workload
    containers = pod.get("containers")
    container = next((each for each in containers.list() if each.text("name") == _MAIN), None) if containers else None
    if container is not None and container.get("command") is not None:
        return None  # its own start, which is read like any other container's
    env = list_env(container.get("env")) if container else {}
    given = [item.word() for item in _items(container, "args")]
    if more := env.get("VLLM_ADDITIONAL_ARGS"):
        given += added_words(more, document.source)
    served = serve_words(uri)[:2] if names_model(tuple(given)) else serve_words(uri)
    words = (*served, *_parallel(workload), *given)
    place = document.source.place
    return StartedServer(
        "kubernetes", words, env, place, place(uri.offset), container.text("image") if container else "",
        in_container=True, shm=_MOUNTED, gpus=cards(container) if container else None,
        gpu_names=gpus_named(container or pod, pod, document.get("metadata"), workload),
        memory_limit_bytes=bytes_of(container.text("resources", "limits", "memory")) if container else None,
        start_limit=start_limit(container) if container else None, read_as=_read_as(document),
    )  # fmt: skip


def _read_as(document: Node) -> str:
    return f"Kubernetes {document.text('kind')} {document.text('metadata', 'name')}".rstrip()


def _parallel(workload: Node) -> Iterator[Word]:
    for key, flag in _PARALLEL:
        node = workload.get("parallelism", key)
        if node is not None and (node.scalar or "").isdecimal():
            yield Word(f"{flag}={node.scalar}", node.offset)
    expert = workload.get("parallelism", "expert")
    if expert is not None and expert.scalar == "true":
        yield Word("--enable-expert-parallel", expert.offset)


def _items(node: Node | None, key: str) -> list[Node]:
    inner = node.get(key) if node is not None else None
    return [item for item in inner.list() if item.scalar is not None] if inner is not None else []


def _kubeai_model(document: Node) -> Iterator[StartedServer]:
    spec = document.get("spec")
    if spec is not None and document.text("spec", "engine").lower() in ("", "vllm") and spec.get("url") is not None:
        yield kubeai_server(spec, _read_as(document), document.text("metadata", "annotations", GPU_ANNOTATION))
