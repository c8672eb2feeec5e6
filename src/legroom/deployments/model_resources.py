"""Resources that name a model and leave the pod to their controller: KServe's LLMInferenceService, KubeAI's Model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
"""Of `spec.parallelism`: what KServe's own templates make of it."""
_EXPERT = ("expert", "--enable-expert-parallel")
_ONE_NODE_TENSOR_SINCE, _ONE_NODE_KNOWN_UNTIL = "0.20", "0.20"
"""KServe's templates for one node (config/llmisvcconfig/config-llm-template.yaml of v0.17.0 to v0.20.0) pass nothing of
`spec.parallelism` on before 0.20.0, and then the tensor size alone (issues 5773 and 6044 of kserve/kserve). Those for
several nodes pass on all but the pipeline size."""
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-ep": "--enable-expert-parallel",
}
_DIGITS = 5
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
            server = _workload(document, workload, uri, own_templates=spec.get("baseRefs") is not None)
            if server is not None:
                yield server


def _workload(document: Node, workload: Node, uri: Node, own_templates: bool) -> StartedServer | None:
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
    asked = tuple(_parallel(workload))
    on_one_node = not own_templates and workload.get("worker") is None
    passed_on = tuple(word for key, word in asked if not on_one_node or key == "tensor")
    words = (*served, *passed_on, *given)
    place = document.source.place
    return StartedServer(
        "kubernetes",
        words,
        env,
        place,
        place(uri.offset),
        container.text("image") if container else "",
        in_container=True,
        shm=_MOUNTED,
        gpus=_gpus(container, workload),
        gpu_names=gpus_named(container or pod, pod, document.get("metadata"), workload),
        memory_limit_bytes=bytes_of(container.text("resources", "limits", "memory")) if container else None,
        start_limit=start_limit(container) if container else None,
        read_as=_read_as(document),
        remarks=tuple(_not_passed_on(asked, given)) if on_one_node else (),
    )


def _gpus(container: Node | None, workload: Node) -> int | None:
    """Of all nodes: KServe starts one pod for every `dataLocal` of the `data` copies."""
    of_a_pod = cards(container) if container else None
    if of_a_pod is None or workload.get("worker") is None:
        return of_a_pod
    sizes = (workload.text("parallelism", key) for key in ("data", "dataLocal"))
    copies, local = (max(int(size[:_DIGITS]), 1) if size.isdecimal() else 1 for size in sizes)
    return of_a_pod * -(-copies // local)


def _read_as(document: Node) -> str:
    return f"Kubernetes {document.text('kind')} {document.text('metadata', 'name')}".rstrip()


def _parallel(workload: Node) -> Iterator[tuple[str, Word]]:
    """What `spec.parallelism` asks for, as vLLM's flags."""
    for key, flag in _PARALLEL:
        node = workload.get("parallelism", key)
        if node is not None and (node.scalar or "").isdecimal():
            yield key, Word(f"{flag}={node.scalar}", node.offset)
    key, flag = _EXPERT
    expert = workload.get("parallelism", key)
    if expert is not None and expert.scalar == "true":
        yield key, Word(flag, expert.offset)


def _not_passed_on(asked: Sequence[tuple[str, Word]], given: Sequence[Word]) -> Iterator[str]:
    """What a vLLM on one node does not hear of, unless its own flags say it."""
    told = {word.text.partition("=")[0].replace("_", "-") for word in given}
    told |= {_SHORT[flag] for flag in told & _SHORT.keys()}
    for key, word in asked:
        flag, _, size = word.text.partition("=")
        if size == "1" or flag in told:
            continue
        releases = f"before {_ONE_NODE_TENSOR_SINCE}" if key == "tensor" else f"up to {_ONE_NODE_KNOWN_UNTIL}"
        yield (
            f"KServe {releases} does not pass spec.parallelism.{key} on to a vLLM on one node: write "
            f"{flag} {size}".rstrip()
            + " into VLLM_ADDITIONAL_ARGS, which is always passed on."
        )


def _items(node: Node | None, key: str) -> list[Node]:
    inner = node.get(key) if node is not None else None
    return [item for item in inner.list() if item.scalar is not None] if inner is not None else []


def _kubeai_model(document: Node) -> Iterator[StartedServer]:
    spec = document.get("spec")
    if spec is not None and document.text("spec", "engine").lower() in ("", "vllm") and spec.get("url") is not None:
        yield kubeai_server(spec, _read_as(document), document.text("metadata", "annotations", GPU_ANNOTATION))
