"""Kubernetes manifests: every container that starts vLLM, in whatever object it stands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from legroom.deployments.containers import bytes_of, image_words, serves_vllm
from legroom.deployments.launchers import KSERVE, launched_engine
from legroom.deployments.node_gpus import gpus_named
from legroom.deployments.server_words import expand, server_start
from legroom.deployments.shell.scan import Word, placed_env
from legroom.deployments.shell.script import script_subjects
from legroom.deployments.subjects import At, Invoked, Runs, StartedServer, with_servers
from legroom.deployments.text import Text
from legroom.deployments.yaml_nodes import Node
from legroom.facts.flags import all_flag_names, flag_name

_RENAMED = {"--model-id": "--model", "--model-name": "--served-model-name", "--model-revision": "--revision"}
_OWN = ("--backend", "--task", "--model-dir")
"""Flags of KServe's server that some vLLM has too, with other values."""
_ADDITIONAL = "VLLM_ADDITIONAL_ARGS"
"""KServe's own way to add flags."""
_WITHOUT_VLLM = "huggingface"
"""The other backend of KServe's Hugging Face runtime."""


def runtime_of(model: Node) -> str:
    """`vllm` or `huggingface` where an InferenceService's model is served by vLLM, else empty."""
    name = model.text("modelFormat", "name").lower()
    return name if name in ("vllm", "huggingface") else ""


def kserve_words(model: Node, given: tuple[Word, ...]) -> tuple[Word, ...] | None:
    """The arguments of KServe's Hugging Face runtime as vLLM's; None where another backend serves the model.

    Its server has many flags of its own: only what some release of vLLM knows is taken for vLLM's.
    """
    known = set(all_flag_names())
    words: list[Word] = []
    keeps = True
    for i, word in enumerate(given):
        head, equals, value = word.text.partition("=")
        if not head.startswith("--"):
            words += [word] if keeps else []
            continue
        name = flag_name(head)
        following = given[i + 1].text if i + 1 < len(given) else ""
        if name == "--backend" and (value or following) == _WITHOUT_VLLM:
            return None
        name = _RENAMED.get(name, name)
        keeps = name in known and name not in _OWN
        words += [word.with_text(name + equals + value)] if keeps else []
    return (*words, *_stored_model(model, words))


def _stored_model(model: Node, words: list[Word]) -> tuple[Word, ...]:
    """`storageUri: hf://org/model` where no flag names the model."""
    storage = model.get("storageUri")
    if storage is None or any(word.text.partition("=")[0] == "--model" for word in words):
        return ()
    scheme, _, name = (storage.scalar or "").partition("://")
    return (Word(f"--model={name}", storage.offset),) if scheme == "hf" and name else ()


_GPU = re.compile(r"(nvidia|amd|gpu\.intel)\.com/(gpu|mig-.*|i915|xe)")
GRACE_S = 30.0
"""terminationGracePeriodSeconds unless told."""
_PERIOD_S, _FAILURES = 10.0, 3.0
"""Kubernetes' defaults of a probe."""
_MOST_PODS = 1000
_RAY_GROUP = "ray.io"
_DYNAMO_KINDS = ("DynamoGraphDeployment", "DynamoComponentDeployment")
_DYNAMO_SHM = "8Gi"
"""What Dynamo's operator mounts at /dev/shm unless told (deploy/operator/docs)."""
_CONTAINERS = ("containers", "initContainers", "container")
"""Where a container stands that may leave everything to its image."""


def is_kubernetes(document: Node) -> bool:
    """Whether a YAML document is an object of Kubernetes."""
    return document.get("apiVersion") is not None and document.get("kind") is not None


def kubernetes_subjects(document: Node) -> Iterator[StartedServer | Invoked]:
    """Every server that its pods start."""
    kind, name = document.text("kind"), document.text("metadata", "name")
    size = document.text("spec", "leaderWorkerTemplate", "size")
    pods = int(size) if size.isdecimal() and 0 < int(size[:5]) < _MOST_PODS else 1

    def described(server: StartedServer) -> StartedServer:
        gpus = server.gpu_count  # of one pod; a group of pods is one server
        gpus = gpus * pods if gpus is not None and pods > 1 else server.gpus
        shm = server.shm or (_DYNAMO_SHM if kind in _DYNAMO_KINDS else None)
        return replace(server, gpus=gpus, shm=shm, read_as=f"Kubernetes {kind} {name}".rstrip())

    yield from with_servers(_pods(document), described)


def _pods(document: Node) -> Iterator[StartedServer | Invoked]:
    metadata = document.get("metadata"), document.get("spec", "template", "metadata")
    of_pods: dict[int, Node] = {}
    # KubeRay has every container without a command of its own start Ray, whatever its image would.
    left_to_image = document.text("apiVersion").partition("/")[0] != _RAY_GROUP
    for node in document.walk():
        if not isinstance(node.values, dict):
            continue
        own, spec = node.get("metadata"), node.get("spec")
        if own is not None and spec is not None:
            of_pods[id(spec)] = own  # a template for pods, wherever a kind keeps it: LeaderWorkerSet has two
        for key, value in node.items():
            if key == "exec":
                continue  # the command of a probe or a hook
            for container in value.list() or [value]:
                if isinstance(container.values, dict) and _is_container(key, container, left_to_image):
                    yield from _container(
                        container, node, gpus_named(container, node, of_pods.get(id(node)), *metadata)
                    )


def _is_container(key: str, node: Node, left_to_image: bool) -> bool:
    """Whether a mapping says what is run: Argo, Dynamo and KServe put containers under names of their own."""
    if any(inner is not None and inner.list() for inner in (node.get("command"), node.get("args"))):
        return True
    by_image = left_to_image and key in _CONTAINERS and serves_vllm(node.text("image"))
    return by_image or bool(runtime_of(node)) or (key in _CONTAINERS and _ADDITIONAL in list_env(node.get("env")))


def _container(container: Node, pod: Node, gpu_names: tuple[str, ...]) -> Iterator[StartedServer | Invoked]:
    env = list_env(container.get("env"))
    image = container.text("image")
    entry, given = _word_list(container.get("command"), env), _word_list(container.get("args"), env)
    launcher = ""
    if runtime := runtime_of(container):
        image = image or "vllm"
        if runtime == "huggingface" and not entry:
            renamed = kserve_words(container, given)
            if renamed is None:
                return
            given, launcher = renamed, KSERVE
    if more := env.get(_ADDITIONAL):
        given += added_words(more, container.source)
        image = image or "vllm"
    for hook in ("preStop", "postStart"):
        command = container.get("lifecycle", hook, "exec", "command")
        yield from scripts(command, env) if command is not None else ()
    yield from with_servers(
        servers(container, image, entry, given, env, "kubernetes"),
        lambda server: replace(
            server,
            image=image,
            in_container=True,
            shm=_pod_shm(container, pod),
            gpus=cards(container),
            gpu_names=gpu_names,
            launcher=server.launcher or launcher,
            memory_limit_bytes=bytes_of(container.text("resources", "limits", "memory")),
            start_limit=start_limit(container),
            stop_limit=_grace(container, pod),
        ),
    )


def servers(
    owner: Node, image: str, entry: tuple[Word, ...], given: tuple[Word, ...], env: Mapping[str, Word], runs: Runs
) -> Iterator[StartedServer | Invoked]:
    """The server that a container's entry point and arguments start, or what its scripts run."""
    words = image_words(image, entry, given, owner.offset)
    at = server_start(tuple(word.text for word in words))
    if at is not None:
        place = owner.source.place
        yield StartedServer(runs, words[at:], env, place, place(words[at].offset), image)
    elif engine := launched_engine(words):
        place = owner.source.place
        at_word = place(engine.words[0].offset)
        yield StartedServer(runs, engine.words, env, place, at_word, image, launcher=engine.launcher)
    else:
        for node in (owner.get("entrypoint"), owner.get("command"), owner.get("args")):
            yield from scripts(node, env, runs) if node is not None else ()


def scripts(node: Node, env: Mapping[str, Word], runs: Runs = "kubernetes") -> Iterator[StartedServer | Invoked]:
    """`["sh", "-c", "vllm serve ..."]`: the text of the last word, read as a script."""
    for item in node.list() or ([node] if node.scalar else []):
        text = item.scalar or ""
        if any(character.isspace() for character in text.strip()):
            yield from script_subjects(item.inner(), runs, placed_env(env, item.source.place))


def added_words(variable: Word, source: Text) -> tuple[Word, ...]:
    """The words of a variable that a shell puts into a command, each at its place."""
    words, cursor = [], variable.offset
    for text in _split(variable.text):
        at = source.text.find(text, cursor, variable.offset + 2 * len(variable.text) + len(text))
        cursor = at if at >= 0 else cursor
        words.append(Word(text, cursor, text))
    return tuple(words)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _word_list(node: Node | None, env: Mapping[str, Word]) -> tuple[Word, ...]:
    values = {name: word.text for name, word in env.items()}
    if node is None:
        return ()
    return tuple(item.word().with_text(expand(item.scalar, values)) for item in node.list() if item.scalar is not None)


def list_env(node: Node | None) -> dict[str, Word]:
    """A list of `name:` and `value:`."""
    env = {}
    for item in node.list() if node else ():
        value = item.get("value")
        if item.text("name") and value is not None and value.scalar is not None:
            env[item.text("name")] = value.word()
    return env


def _pod_shm(container: Node, pod: Node) -> str | None:
    volumes = pod.get("volumes")
    in_memory = {
        volume.text("name"): volume.text("emptyDir", "sizeLimit") or "half of the node"
        for volume in (volumes.list() if volumes else ())
        if volume.text("emptyDir", "medium") == "Memory" or volume.get("hostPath") is not None
    }
    mounts = container.get("volumeMounts")
    for mount in mounts.list() if mounts else ():
        if mount.text("mountPath").rstrip("/") == "/dev/shm" and mount.text("name") in in_memory:
            return in_memory[mount.text("name")]
    return "host" if pod.text("hostIPC") == "true" else None


def cards(container: Node) -> int | None:
    """How many GPUs, or slices of one, a container is given."""
    for side in ("limits", "requests"):
        amounts = container.get("resources", side)
        for name, amount in amounts.items() if amounts else ():
            if _GPU.fullmatch(name) and (amount.scalar or "").isdecimal():
                return int(amount.scalar or 0)
    return None


def start_limit(container: Node) -> At | None:
    """How long a pod may load: its startup probe, else its liveness probe."""
    startup, liveness = container.get("startupProbe"), container.get("livenessProbe")
    for probe in (startup, liveness):
        if probe is not None:
            period = number(probe, "periodSeconds", _PERIOD_S)
            seconds = number(probe, "initialDelaySeconds", 0.0) + period * number(probe, "failureThreshold", _FAILURES)
            return At(seconds, probe.source.place(probe.offset))
    return None


def number(node: Node, key: str, default: float) -> float:
    """A number of a mapping, the default where it is none."""
    try:
        return float(node.text(key) or default)
    except ValueError:
        return default


def _grace(container: Node, pod: Node) -> At:
    node = pod.get("terminationGracePeriodSeconds")
    if node is None or node.scalar is None:
        return At(GRACE_S, container.source.place(container.offset))
    return At(number(pod, "terminationGracePeriodSeconds", GRACE_S), node.source.place(node.offset))
