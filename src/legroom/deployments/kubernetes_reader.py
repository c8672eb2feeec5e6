"""Kubernetes manifests: the containers that start vLLM, in objects of any kind."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import Any

from legroom.deployments.container_images import container_command, is_server_image, kubernetes_bytes, repeated_entry
from legroom.deployments.mounts_and_ports import Mount, PublishedPort
from legroom.deployments.server_words import DYNAMO, KSERVE, basename, dynamo_as_serve, expand_variables, server_start
from legroom.deployments.shell.lexer import Word, env_with_places, split_words, words_found_in
from legroom.deployments.shell.shell_script import script_subjects
from legroom.deployments.source_text import OPEN_WORD, Place, Text
from legroom.deployments.subjects import InvokedCommand, Probe, Runs, StartedServer, Subject, TimeLimit, change_servers
from legroom.deployments.yaml_nodes import Node
from legroom.facts import pattern
from legroom.facts.flags import all_flag_names, flag_name
from legroom.facts.gpus import GPU_ANNOTATION, gpu_of_labels, gpu_of_resource, naming_labels

_RENAMED = {"--model-id": "--model", "--model-name": "--served-model-name", "--model-revision": "--revision"}
_KSERVE_FLAGS = ("--backend", "--task", "--model-dir")
"""Flags of KServe's server that some vLLM release has with other values."""
_ADDITIONAL = "VLLM_ADDITIONAL_ARGS"  # KServe's variable for more flags.


def runtime_of(model: Node) -> str:
    """KServe's runtime that serves the model with vLLM: `vllm` or `huggingface`; else empty."""
    name = model.text("modelFormat", "name").lower()
    return name if name in ("vllm", "huggingface") else ""


def kserve_words(model: Node, given: tuple[Word, ...]) -> tuple[Word, ...] | None:
    """vLLM's flags for the words `given` to KServe's Hugging Face runtime; None if another backend serves the model."""
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
        if name == "--backend" and (value or following) == "huggingface":
            return None
        name = _RENAMED.get(name, name)
        keeps = name in known and name not in _KSERVE_FLAGS
        words += [word.with_text(name + equals + value)] if keeps else []
    storage = model.get("storageUri")
    if storage is not None and all(word.text.partition("=")[0] != "--model" for word in words):
        scheme, _, model_id = (storage.scalar or "").partition("://")
        words += [Word(f"--model={model_id}", storage.offset)] if scheme == "hf" and model_id else []
    return tuple(words)


GPU_RESOURCE = re.compile(r"(nvidia|amd|gpu\.intel)\.com/(gpu|mig-.*|i915|xe)")
_OTHER_DEVICE = pattern("kubernetes_reader.other_device")
_RAY_GROUP = "ray.io"
_DYNAMO_KINDS = ("DynamoGraphDeployment", "DynamoComponentDeployment")
_DYNAMO_SHM = "8Gi"  # The default size of /dev/shm of Dynamo's operator (deploy/operator/docs).
_CONTAINERS = ("containers", "initContainers", "container")  # Keys of containers that may have no command of their own.


def is_kubernetes(document: Node) -> bool:
    """Whether the document has an apiVersion and a kind."""
    return document.get("apiVersion") is not None and document.get("kind") is not None


def kubernetes_subjects(document: Node, config_maps: Mapping[str, Node]) -> Iterator[Subject]:
    """The servers, each with its LeaderWorkerSet group's GPUs, and commands of a manifest; `config_maps`: by name."""
    kind, name = document.text("kind"), document.text("metadata", "name")
    size = document.text("spec", "leaderWorkerTemplate", "size")
    is_of_ray = document.text("apiVersion").partition("/")[0] == _RAY_GROUP  # KubeRay mounts /dev/shm itself
    pods = int(size) if size.isdecimal() and 0 < int(size[:5]) < 1000 else 1

    def with_group_gpus_and_shm(server: StartedServer) -> StartedServer:
        """The server with the GPUs of all pods of its group, and the /dev/shm that its operator mounts."""
        pod_gpus = server.gpu_count
        gpus = pod_gpus * pods if pod_gpus is not None and pods > 1 else server.gpus
        shm = server.shm or (_DYNAMO_SHM if kind in _DYNAMO_KINDS else "KubeRay's" if is_of_ray else None)
        return replace(server, gpus=gpus, shm=shm, read_as=f"Kubernetes {kind} {name}".rstrip())

    yield from change_servers(_container_subjects(document, config_maps), with_group_gpus_and_shm)


def _container_subjects(document: Node, config_maps: Mapping[str, Node]) -> Iterator[Subject]:
    """The servers and commands of every container anywhere in the manifest, custom resources included."""
    metadata = document.get("metadata"), document.get("spec", "template", "metadata")
    of_pods: dict[int, Node] = {}
    # KubeRay starts Ray in every container without a command.
    left_to_image = document.text("apiVersion").partition("/")[0] != _RAY_GROUP
    is_whole = document.text("apiVersion") == "apps/v1" and document.get("spec", "selector") is not None  # no patch
    for node in document.walk():
        if not isinstance(node.values, dict):
            continue
        own, spec = node.get("metadata"), node.get("spec")
        if own is not None and spec is not None:
            of_pods[id(spec)] = own  # a pod template; a LeaderWorkerSet has two
        for key, value in node.items():
            if key == "exec":
                continue  # the command of a probe or a hook
            for container in value.list() or [value]:
                if isinstance(container.values, dict) and _is_container(key, container, left_to_image):
                    names = possible_gpus(container, node, of_pods.get(id(node)), *metadata)
                    env = _variables(container, config_maps)
                    is_one = is_whole or bool(container.list("ports"))
                    yield from _subjects_of_container(container, node, names, env, is_one)


def _is_container(key: str, node: Node, left_to_image: bool) -> bool:
    """Whether the mapping at `key` is a container: by its command, args or KServe runtime; also by a vLLM image where a
    container without a command runs that of its image (`left_to_image`)."""
    if any(inner is not None and inner.list() for inner in (node.get("command"), node.get("args"))):
        return True
    by_image = left_to_image and key in _CONTAINERS and is_server_image(node.text("image"))
    return by_image or bool(runtime_of(node)) or (key in _CONTAINERS and _ADDITIONAL in env_list(node.get("env")))


def _variables(container: Node, config_maps: Mapping[str, Node]) -> dict[str, Word]:
    """The variables of a container, those from ConfigMaps of the same file included."""
    env: dict[str, Word] = {}
    for item in container.list("envFrom"):
        given = config_maps.get(item.text("configMapRef", "name"))
        env |= {name: value.word() for name, value in (given.items("data") if given else ()) if value.scalar}
    for item in container.list("env"):
        given = config_maps.get(item.text("valueFrom", "configMapKeyRef", "name"))
        value = given.get("data", item.text("valueFrom", "configMapKeyRef", "key")) if given else None
        env |= {item.text("name"): value.word()} if value is not None and value.scalar else {}
    return env | env_list(container.get("env"))


def _subjects_of_container(
    container: Node, pod: Node, gpu_names: tuple[str, ...], env: dict[str, Word], is_whole: bool
) -> Iterator[Subject]:
    """A container's servers and commands, lifecycle hooks included; `is_whole`: the file is more than a patch."""
    image, is_whole = container.text("image"), is_whole and container.get("image") is not None
    entry, given = word_list(container.get("command"), env), word_list(container.get("args"), env)
    launcher = ""
    if runtime := runtime_of(container):
        image = image or "vllm"
        if runtime == "huggingface" and not entry:
            renamed = kserve_words(container, given)
            if renamed is None:
                return
            given, launcher = renamed, KSERVE
    if more := env.get(_ADDITIONAL):
        given += words_of_variable(more, container.source)
        image = image or "vllm"
    for hook in ("preStop", "postStart"):
        command = container.get("lifecycle", hook, "exec", "command")
        yield from script_commands(command, env) if command is not None else ()
    elsewhere = {item.text("name") for item in container.list("env") if item.get("valueFrom") is not None}
    listed = container.list("ports")
    ports = tuple(PublishedPort(port.text("containerPort"), port.source.place(port.offset)) for port in listed)
    yield from change_servers(
        container_servers(container, image, entry, given, env, "kubernetes"),
        lambda server: replace(
            server,
            image=image,
            in_container=bool(image),  # a patch has none, and its base may mount /dev/shm
            shm=_pod_shm(container, pod) or ("the runtime's" if runtime else None),
            gpus=gpu_limit(container),
            other_device=other_device(container),
            gpu_names=gpu_names,
            launcher=server.launcher or launcher,
            memory_limit_bytes=kubernetes_bytes(container.text("resources", "limits", "memory")),
            start_limit=start_limit(container),
            repeated_entry=repeated_entry(image, entry, given),
            has_no_gpu=_has_no_gpu(container, pod, is_whole),
            mounts=tuple(_mounts(container, pod)) if is_whole else None,
            has_read_only_root=container.text("securityContext", "readOnlyRootFilesystem") == "true",
            other_env=frozenset(elsewhere | ({"*"} if container.get("envFrom") is not None else set())),
            declared_ports=ports if len(pod.list("containers")) == 1 else (),
            probes=tuple(_probes(container, is_alone=len(pod.list("containers")) < 2, is_whole=is_whole)),
        ),
    )


def container_servers(
    owner: Node, image: str, entry: tuple[Word, ...], given: tuple[Word, ...], env: Mapping[str, Word], runs: Runs
) -> Iterator[Subject]:
    """The server that container `owner` starts by `entry` and `given` words, or its scripts' commands; `runs`: how."""
    words = container_command(image, entry, given, owner.offset)
    at, place = server_start(tuple(word.text for word in words)), owner.source.place
    if at is not None:
        is_exec = runs == "kubernetes"  # Compose expands variables itself
        yield StartedServer(runs, words[at:], env, place, place(words[at].offset), image, is_exec_form=is_exec)
    elif engine := dynamo_as_serve(words):
        yield StartedServer(runs, engine, env, place, place(engine[0].offset), image, launcher=DYNAMO)
    else:
        if any(word.text == "-m" or basename(word.text) == "vllm" for word in words):
            yield InvokedCommand(words, "", place)
        for node in (owner.get("entrypoint"), owner.get("command"), owner.get("args")):
            yield from script_commands(node, env, runs) if node is not None else ()


def script_commands(node: Node, env: Mapping[str, Word], runs: Runs = "kubernetes") -> Iterator[Subject]:
    """The servers and commands in scripts of `["sh", "-c", "vllm serve ..."]`; `env`: variables, `runs`: by what."""
    for item in node.list() or ([node] if node.scalar else []):
        if any(character.isspace() for character in (item.scalar or "").strip()):
            yield from script_subjects(item.inner(), runs, env_with_places(env, item.source.place))


def words_of_variable(variable: Word, source: Text) -> tuple[Word, ...]:
    """The shell words in a variable's value, each with its place in the file."""
    end = variable.offset + 3 * len(variable.text)
    return words_found_in(source.text, split_words(variable.text), variable.offset, end)


def word_list(node: Node | None, env: Mapping[str, Word]) -> tuple[Word, ...]:
    """The words of a `command` or `args` list with $(VARIABLES) of `env`; last `$@` where a template may add words."""
    values = {name: word.text for name, word in env.items()}
    items = node.list() if node is not None else ()  # an item that is no scalar is what a template fills in
    texts = [OPEN_WORD if item.scalar is None else expand_variables(item.scalar, values) for item in items]
    words = tuple(item.word().with_text(text) for item, text in zip(items, texts, strict=True))
    rest = node.source.text[node.offset :] if node is not None else ""
    is_open = node is not None and "{{" in rest[: max(node.end - node.offset, rest.find("\n"))]
    return (*words, Word("$@", node.offset)) if node is not None and is_open else words


def env_list(node: Node | None) -> dict[str, Word]:
    """The variables of a container's `env` list of `name:` and `value:`."""
    items = ((item.text("name"), item.get("value")) for item in (node.list() if node else ()))
    return {name: value.word() for name, value in items if name and value is not None and value.scalar is not None}


def _pod_shm(container: Node, pod: Node) -> str | None:
    """The size limit of the volume at /dev/shm (`half of the node` if unlimited), `host` with hostIPC; else None."""
    in_memory = {
        volume.text("name"): volume.text("emptyDir", "sizeLimit") or "half of the node"
        for volume in pod.list("volumes")
        if volume.text("emptyDir", "medium") == "Memory" or volume.get("hostPath") is not None
    }
    for mount in container.list("volumeMounts"):
        if mount.text("mountPath").rstrip("/") == "/dev/shm" and mount.text("name") in in_memory:
            return in_memory[mount.text("name")]
    return "host" if pod.text("hostIPC") == "true" else None


def gpu_limit(container: Node) -> int | None:
    """The number of GPUs or MIG slices that a container requests; None where none is given or it is no number."""
    amounts = (amount.scalar or "" for name, amount in _resource_amounts(container) if GPU_RESOURCE.fullmatch(name))
    return next((int(amount) for amount in amounts if amount.isdecimal()), None)


def other_device(container: Node) -> str:
    """The resource of other hardware than GPUs that a container requests; empty without one."""
    return next((name for name, _ in _resource_amounts(container) if _OTHER_DEVICE.fullmatch(name)), "")


def _resource_amounts(container: Node) -> Iterator[tuple[str, Node]]:
    """(resource, amount) among the container's limits, then its requests."""
    for side in ("limits", "requests"):
        yield from container.items("resources", side)


def start_limit(container: Node) -> TimeLimit | None:
    """The seconds until the startup, else the liveness probe gives up; None without one or with a postStart hook."""
    probe = _probe(container, "startup") or _probe(container, "liveness")
    if probe is None or container.get("lifecycle", "postStart") is not None:
        return None  # no probe runs before that hook has ended
    period = float_at(probe, "periodSeconds", 10.0)
    seconds = float_at(probe, "initialDelaySeconds", 0.0) + period * float_at(probe, "failureThreshold", 3.0)
    return TimeLimit(seconds, probe.source.place(probe.offset))


def _probe(container: Node, kind: str) -> Node | None:
    """The `startup`, `readiness` or `liveness` probe (`kind`) of a container; None where it is missing or null."""
    probe = container.get(f"{kind}Probe")
    return probe if probe is not None and probe.values is not None else None


def _mounts(container: Node, pod: Node) -> Iterator[Mount]:
    """A `Mount` for each of the container's volumeMounts, with the kind of pod volume behind it."""
    sources = {volume.text("name"): volume for volume in pod.list("volumes")}
    for mount in container.list("volumeMounts"):
        source = sources.get(mount.text("name"))
        is_empty = source is not None and source.get("emptyDir") is not None
        is_host = source is not None and source.get("hostPath") is not None
        is_read_only = mount.text("readOnly") == "true"
        yield Mount(mount.text("mountPath"), "empty" if is_empty else "host" if is_host else "volume", is_read_only)


def _has_no_gpu(container: Node, pod: Node, is_whole: bool) -> bool:
    """Whether surely nothing gives a container an accelerator; False where that is open: in a patch (not `is_whole`)
    without resources, by a template's variable, or by a claim, a runtime class or privileges."""
    names = [name for name, _ in _resource_amounts(container)]
    others = (container.get("resources", "claims"), pod.get("resourceClaims"), pod.get("runtimeClassName"))
    gives_other = container.text("securityContext", "privileged") == "true" or others != (None, None, None)
    is_told = bool(names) or (is_whole and container.get("resources") is None)
    return is_told and not gives_other and not any("/" in name or "$" in name for name in names)


_ASKED = re.compile(r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]):(\d+)(/[\w./-]*)?")
_FAILS_ON_404 = re.compile(r"curl\b.*\s(-\w*f\w*|--fail)\b|\bwget\b|urlopen|raise_for_status")


def _probes(container: Node, is_alone: bool, is_whole: bool) -> Iterator[Probe]:
    """A container's probes, `none` if neither startup nor readiness; port and path only if `is_alone` in its pod."""
    ports = {port.text("name"): port.text("containerPort") for port in container.list("ports")}
    given = {kind: _probe(container, kind) for kind in ("startup", "readiness", "liveness")}
    if (container.list("ports") or is_whole) and not given["startup"] and not given["readiness"]:
        yield Probe("none", container.source.place((container.list("ports") or [container])[0].offset))
    for kind, probe in given.items():
        if probe is None:
            continue
        port = probe.text("httpGet", "port") or probe.text("tcpSocket", "port")
        command = probe.list("exec", "command")
        found = probe_of_words(kind, [item.scalar or "" for item in command], probe.source.place(probe.offset))
        asked = probe.get("httpGet")
        path = (asked.text("path") or "/" if asked is not None else found.path) if is_alone else ""
        yield replace(
            found,
            port=(found.port or ports.get(port, port)) if is_alone else "",
            path=path,
            sends_key=found.sends_key or bool(probe.list("httpGet", "httpHeaders")),
        )


def probe_of_words(kind: Any, words: list[str], place: Place) -> Probe:
    """A probe of this kind that runs a command (`words`) in a container, and the port and path it asks there."""
    line = " ".join(words)
    asked = _ASKED.search(line) if len(set(_ASKED.findall(line))) == 1 else None  # several: of other programs too
    program = (split_words(words[2]) if words[1:2] == ["-c"] and len(words) > 2 else words)[:1]
    path = (asked[2] or "/") if asked and _FAILS_ON_404.search(line) else ""
    return Probe(kind, place, asked[1] if asked else "", "".join(program), path, "uthorization" in line)


def float_at(node: Node, key: str, default: float) -> float:
    """The number at a key of a mapping; `default` where it is missing or no number."""
    try:
        return float(node.text(key) or default)
    except ValueError:
        return default


_REQUIRED_NODES = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
_MIG_PROFILE = re.compile(r".*\bmig (.+)")


def possible_gpus(container: Node, pod: Node, *metadata: Node | None) -> tuple[str, ...]:
    """The GPUs that a pod may run on, as `--gpu` accepts them: those of an annotation in one of `metadata`, else of the
    pod's node labels and the container's resources; empty where nothing names one."""
    for described in metadata:
        written = described.text("annotations", GPU_ANNOTATION) if described is not None else ""
        if written:
            return tuple(name.strip() for name in written.split(",") if name.strip())
    named = tuple(dict.fromkeys(filter(None, map(gpu_of_labels, _gpu_label_sets(pod)))))
    part = next((part for name, _ in _resource_amounts(container) if (part := gpu_of_resource(name))), "")
    if not part:
        return named
    profile = _MIG_PROFILE.match(part)
    whole = [f"{name} mig {profile[1]}" for name in named if profile and " mig " not in name.lower()]
    return tuple(name for name in whole if gpu_of_labels({"nvidia.com/gpu.product": name})) or (part,)


def _gpu_label_sets(pod: Node) -> Iterator[dict[str, str]]:
    """Each set of node labels that the pod's selector and required affinity allow, at most 32 an affinity term."""
    fixed = {key: value.scalar or "" for key, value in pod.items("nodeSelector")}
    for chosen in [_required_gpu_labels(term) for term in pod.list(*_REQUIRED_NODES)] or [{}]:
        for combination in islice(product(*chosen.values()), 32):
            yield fixed | dict(zip(chosen, combination, strict=True))


def _required_gpu_labels(term: Node) -> dict[str, list[str]]:
    """The values of GPU labels that a node selector term requires with `In`."""
    required = (each for each in term.list("matchExpressions") if each.text("operator") == "In" and each.get("values"))
    return {
        each.text("key"): [value.scalar or "" for value in each.list("values")]
        for each in required
        if each.text("key") in naming_labels()
    }
