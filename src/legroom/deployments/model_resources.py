"""Models whose pod is made for them: KServe's LLMInferenceService, KubeAI's Model, vLLM's production stack."""

from collections.abc import Iterator, Sequence

from legroom.deployments import kubernetes_reader
from legroom.deployments.container_images import kubernetes_bytes
from legroom.deployments.shell.lexer import Word, serve_words
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.facts import pattern, read_data
from legroom.facts.flags import flags_ever
from legroom.facts.gpus import GPU_ANNOTATION, gpu_of_profile
from legroom.units import cdiv

_KSERVE_RELEASE = "0.20"
"""KServe's templates for one node (config/llmisvcconfig/config-llm-template.yaml of v0.17.0 to v0.20.0) pass nothing of
`spec.parallelism` on before 0.20.0, and then the tensor size alone (issues 5773 and 6044 of kserve/kserve). Those for
several nodes pass on all but the pipeline size."""


def model_resource_servers(document: Node) -> Iterator[StartedServer]:
    """The servers that the controller of a resource starts; none for other resources."""
    kind, group = document.text("kind"), document.text("apiVersion").partition("/")[0]
    spec, uri = document.get("spec"), document.get("spec", "model", "uri")
    if spec is None:
        return
    if kind == "LLMInferenceService" and group == "serving.kserve.io" and uri is not None:
        for workload in (spec, spec.get("prefill")):  # the main one and, if given, that of prefill
            if workload is not None and (workload is spec or workload.values):
                server = _workload_server(document, workload, uri, own_templates=spec.get("baseRefs") is not None)
                yield from (server,) if server is not None else ()
    elif kind == "Model" and group == "kubeai.org" and spec.text("engine").lower() in ("", "vllm") and spec.get("url"):
        gpu = document.text("metadata", "annotations", GPU_ANNOTATION)
        yield kubeai_server(spec, _resource_title(document), gpu)


def _workload_server(document: Node, workload: Node, uri: Node, own_templates: bool) -> StartedServer | None:
    """The server of KServe's or (`own_templates`) the user's template for a model `uri`; None if it has a command."""
    pod = workload.get("template") or workload
    container = next((each for each in pod.list("containers") if each.text("name") == "main"), None)
    if container is not None and container.get("command") is not None:
        return None  # it is read like any other container
    env = kubernetes_reader.env_list(container.get("env")) if container else {}
    items = container.list("args") if container is not None else ()
    given = [item.word() for item in items if item.scalar is not None]
    if more := env.get("VLLM_ADDITIONAL_ARGS"):
        given += kubernetes_reader.words_of_variable(more, document.source)
    served = serve_words(uri.offset) if has_model_flag(tuple(given)) else _model_words(uri)
    requested = tuple(_parallelism_flags(workload))
    on_one_node = not own_templates and workload.get("worker") is None
    words = (*served, *(word for key, word in requested if not on_one_node or key == "tensor"), *given)
    place = document.source.place
    return StartedServer(
        "kubernetes",
        words,
        env,
        place,
        place(uri.offset),
        container.text("image") if container else "",
        in_container=True,
        shm="mounted",  # by KServe's templates (config/llmisvcconfig)
        gpus=_gpus_of_all_nodes(container, workload),
        gpu_names=kubernetes_reader.possible_gpus(container or pod, pod, document.get("metadata"), workload),
        memory_limit_bytes=kubernetes_bytes(container.text("resources", "limits", "memory")) if container else None,
        start_limit=kubernetes_reader.start_limit(container) if container else None,
        read_as=_resource_title(document),
        remarks=tuple(_dropped_parallelism(requested, given)) if on_one_node else (),
    )


def _gpus_of_all_nodes(container: Node | None, workload: Node) -> int | None:
    """The GPUs of all pods: KServe starts one for every `dataLocal` of the `data` copies; None where unknown."""
    pod_gpus = kubernetes_reader.gpu_limit(container) if container else None
    if pod_gpus is None or workload.get("worker") is None:
        return pod_gpus
    sizes = (workload.text("parallelism", key) for key in ("data", "dataLocal"))
    copies, local = (max(int(size[:5]), 1) if size.isdecimal() else 1 for size in sizes)
    return pod_gpus * cdiv(copies, local)


def _resource_title(document: Node) -> str:
    """`Kubernetes KIND NAME` of a manifest."""
    return f"Kubernetes {document.text('kind')} {document.text('metadata', 'name')}".rstrip()


def _parallelism_flags(workload: Node) -> Iterator[tuple[str, Word]]:
    """(KServe's key, vLLM's flag word) for each size in `spec.parallelism`."""
    for key, flag in read_data("file_formats.json")["kserve_parallelism"].items():
        node = workload.get("parallelism", key)
        if node is not None and (node.scalar or "").isdecimal():
            yield key, Word(f"{flag}={node.scalar}", node.offset)
    expert = workload.get("parallelism", "expert")
    if expert is not None and expert.scalar == "true":
        yield "expert", Word("--enable-expert-parallel", expert.offset)


def _dropped_parallelism(requested: Sequence[tuple[str, Word]], given: Sequence[Word]) -> Iterator[str]:
    """Sentences about the `requested` parallelism flags that KServe does not pass on to a vLLM on one node."""
    flags = {word.text.partition("=")[0].replace("_", "-") for word in given}
    table = flags_ever()
    flags |= {table[flag].name for flag in flags if flag in table}
    for key, word in requested:
        flag, _, size = word.text.partition("=")
        if size == "1" or flag in flags:
            continue
        releases = f"{'before' if key == 'tensor' else 'up to'} {_KSERVE_RELEASE}"
        yield (
            f"KServe {releases} does not pass spec.parallelism.{key} on to a vLLM on one node: write "
            f"{flag} {size}".rstrip()
            + " into VLLM_ADDITIONAL_ARGS, which is always passed on."
        )


_PROFILE = pattern("model_resources.profile")


def is_kubeai_model(node: Node) -> bool:
    """Whether a mapping is a model of KubeAI that vLLM serves."""
    return node.text("engine").lower() == "vllm" and (
        node.get("resourceProfile") is not None or "://" in node.text("url")
    )


def kubeai_server(node: Node, read_as: str = "a KubeAI model", gpu: str = "") -> StartedServer:
    """The server that KubeAI starts for a Model; `read_as`: what messages call it, `gpu`: the one of an annotation."""
    env = {name: value.word() for name, value in node.items("env") if value.scalar is not None}
    profile = _PROFILE.fullmatch(node.text("resourceProfile"))
    # Profiles of other hardware have an image of an unknown release.
    gpu = gpu or (gpu_of_profile(profile["name"]) if profile else "")
    url = node.get("url")
    adapters = node.get("adapters")
    lora = (Word("--enable-lora", adapters.offset),) if adapters is not None and adapters.list() else ()
    flags = (*kubernetes_reader.word_list(node.get("args"), env), *lora)
    words = serve_words((url or node).offset) if url is None or has_model_flag(flags) else _model_words(url)
    place = node.source.place
    return StartedServer(
        "kubernetes",
        (*words, *flags),
        env,
        place,
        place(node.offset),
        image=node.text("image") or ("" if gpu or profile is None else profile["name"]),
        in_container=True,
        shm="mounted",  # by KubeAI in every pod
        gpus=(profile and int(profile["count"])) or 1,
        gpu_names=(gpu,) if gpu else (),
        read_as=read_as,
    )


def has_model_flag(words: tuple[Word, ...]) -> bool:
    """Whether flags name a model, which replaces the one of the resource."""
    return any(word.text.partition("=")[0] == "--model" for word in words)


def _model_words(uri: Node) -> tuple[Word, ...]:
    """`vllm serve MODEL` for a model's URI: the Hub id of `hf://org/model`, any other URI as it is."""
    text = uri.scalar or ""
    scheme, _, name = text.partition("://")
    model = name.partition("?")[0] if scheme == "hf" else text
    return (*serve_words(uri.offset), Word(model, uri.offset, model))


def is_model_spec(node: Node) -> bool:
    """Whether a mapping is an entry of `modelSpec` in the production stack's chart."""
    return bool(node.text("modelURL")) and any(
        node.get(key) is not None for key in ("vllmConfig", "requestGPU", "repository")
    )


def model_spec_server(node: Node) -> StartedServer:
    """The server that the production stack's chart starts for a `modelSpec` entry."""
    url = node.get("modelURL") or node
    repository, tag = node.text("repository"), node.text("tag")
    requested = node.text("requestGPU")
    place, env = node.source.place, kubernetes_reader.env_list(node.get("env"))
    if node.text("enableLoRA") == "true":
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = Word("True", node.offset)
    return StartedServer(
        "kubernetes",
        (*serve_words(url.offset), url.word(), *_vllm_config_flags(node)),
        env,
        place,
        place(url.offset),
        image=f"{repository}:{tag}" if repository and tag else repository,
        in_container=True,
        shm="mounted",  # by the chart where there are several ranks
        gpus=kubernetes_reader.gpu_limit(node)
        or (int(requested) if requested.isdecimal() and int(requested[:5]) else None),
        gpu_names=kubernetes_reader.possible_gpus(node, node),
        memory_limit_bytes=kubernetes_bytes(node.text("limitMemory") or node.text("resources", "limits", "memory")),
        read_as="a model of vLLM's production stack",
    )


def _vllm_config_flags(node: Node) -> Iterator[Word]:
    """The flags that the production stack's chart makes of `vllmConfig`, extraArgs, enableLoRA and raySpec."""
    tables = read_data("file_formats.json")
    flags, switches = tables["production_stack"], tables["production_stack_switches"]
    for key, value in node.items("vllmConfig"):
        if value.scalar and key in flags:
            yield Word(f"{flags[key]}={value.scalar}", value.offset)
        elif value.scalar and key in switches:
            switch = switches[key]
            yield Word(switch if value.scalar == "true" else switch.replace("--", "--no-", 1), value.offset)
    yield from (item.word() for item in node.list("vllmConfig", "extraArgs") if item.scalar is not None)
    if node.text("enableLoRA") == "true":
        yield Word("--enable-lora", node.offset)
    if node.get("raySpec") is not None:
        yield Word("--distributed-executor-backend=ray", node.offset)
