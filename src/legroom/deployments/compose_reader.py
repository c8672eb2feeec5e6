"""Compose files and the `.env` files beside them."""

import copy
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from legroom.deployments.container_images import docker_bytes, is_server_image, repeated_entry
from legroom.deployments.dockerfile import dockerfile_subjects
from legroom.deployments.kubernetes_reader import container_servers, float_at, probe_of_words
from legroom.deployments.mounts_and_ports import Mount, PublishedPort, mount_of, published_port
from legroom.deployments.release_pins import installed_releases, with_release
from legroom.deployments.server_words import expand_variables
from legroom.deployments.shell.lexer import Word, env_with_places, split_words, words_found_in
from legroom.deployments.shell.simple_commands import simple_commands
from legroom.deployments.source_text import Text, read_text
from legroom.deployments.subjects import Probe, StartedServer, Subject, TimeLimit, change_servers
from legroom.deployments.systemd_unit import seconds_of_span
from legroom.deployments.yaml_nodes import Node, load_nodes
from legroom.errors import LegroomError
from legroom.masking import is_secret

_INHERITED_KEYS = ("image", "ipc", "shm_size", "tmpfs", "volumes")
"""The keys that are read of a service that is extended from another file."""
_MOST_GPUS = 16  # GPUs of a machine whose number the file does not tell.


def is_compose(document: Node) -> bool:
    """Whether the document has a `services` mapping and no apiVersion."""
    services = document.get("services")
    return services is not None and isinstance(services.values, dict) and document.get("apiVersion") is None


def compose_subjects(document: Node) -> Iterator[Subject]:
    """The vLLM servers, and all other commands, that the services of a compose document start."""
    services = document.get("services") or document
    folder = ComposeFolder(document)
    for name, service in services.items():
        subjects = _service_subjects(name, service, services, folder)
        for _, placed in document.items("deployment", name):  # Akash's
            if resources := document.get("profiles", "compute", placed.text("profile"), "resources"):
                subjects = change_servers(subjects, partial(_on_akash, resources, service))
            break
        yield from subjects


def _on_akash(resources: Node, service: Node, server: StartedServer) -> StartedServer:
    """The `server` with GPU, memory and ports of an Akash compute profile (`resources`), and the service's mounts."""
    mounts = tuple(Mount(store.text("mount")) for _, store in service.items("params", "storage"))
    units, place = resources.text("gpu", "units"), service.source.place
    opened = [port for port in service.list("expose") if any(to.text("global") == "true" for to in port.list("to"))]
    return replace(
        server,
        gpus=int(units) if units.isdecimal() else None,
        gpu_names=tuple(card.text("model") for card in resources.list("gpu", "attributes", "vendor", "nvidia")),
        memory_limit_bytes=docker_bytes(resources.text("memory", "size")),
        has_no_gpu=False,
        mounts=mounts,
        shm="mounted" if Mount("/dev/shm") in mounts else None,
        published=tuple(PublishedPort(port.text("port"), place(port.offset)) for port in opened),
    )


class ComposeFolder:
    """The files beside a compose file."""

    def __init__(self, document: Node) -> None:
        self.path = Path(document.source.path).parent
        self._is_file = Path(document.source.path).is_file()
        self.is_akash = document.get("deployment") is not None
        self.variables = {name: word.text for name, word in env_file_variables(self.text(".env")).items()}

    @property
    def is_only_compose_file(self) -> bool:
        """Whether the folder holds no second compose file, which could add to the services."""
        return self._is_file and len(list(self.path.glob("*compose*.y*ml"))) < 2

    @property
    def named_variables(self) -> set[str]:
        """The names of variables in the folder's env files, including example files, without those of secrets."""
        files = sorted(self.path.glob("*env*")) if self._is_file else ()
        return {name for file in files if file.is_file() for name in env_file_variables(self.text(file.name))}

    def text(self, name: str) -> str:
        """The text of the file `name` in the folder; empty where it cannot be read."""
        try:
            return read_text(self.path / name) if self._is_file and name else ""
        except LegroomError:
            return ""

    def service(self, file: str, name: str) -> Node | None:
        """The service `name` of the compose `file` in the folder; None where either is missing."""
        try:
            documents = load_nodes(Text(file, self.text(file)))
        except LegroomError:
            return None
        return documents[0].get("services", name) if documents else None


def _with_extended_service(
    service: Node, services: Node, folder: ComposeFolder, depth: int = 0
) -> tuple[Node, dict[str, Word]]:
    """(the service merged with the one it extends, its environment); `depth`: extensions followed so far, at most 8."""
    extends = service.get("extends")
    name = (extends.scalar or extends.text("service")) if extends is not None else ""
    file = extends.text("file") if extends is not None else ""
    base = folder.service(file, name) if file else services.get(name)
    env = {**_env_file_variables(service, folder), **compose_env(service.get("environment"))}
    if extends is None or base is None or depth >= 8 or base is service:
        return service, env
    base, base_env = _with_extended_service(base, services, folder, depth + 1)
    inherited = dict(base.items())
    if file:
        inherited = {key: value for key, value in inherited.items() if key in _INHERITED_KEYS}
        base_env = {key: Word(word.text, extends.offset) for key, word in base_env.items()}
    merged = copy.copy(service)
    merged.values = inherited | dict(service.items())
    return merged, base_env | env


def _env_file_variables(service: Node, folder: ComposeFolder) -> dict[str, Word]:
    """The variables of the files in `env_file`, placed at that key, so that findings about them point there."""
    env: dict[str, Word] = {}
    node = service.get("env_file")
    for item in (node.list() or [node]) if node is not None else ():
        variables = env_file_variables(folder.text(item.scalar or item.text("path")))
        env |= {name: Word(word.text, item.offset) for name, word in variables.items()}
    return env


def _service_subjects(name: str, service: Node, services: Node, folder: ComposeFolder) -> Iterator[Subject]:
    """The servers and commands that one service starts, `extends` and variables resolved."""
    service, env = _with_extended_service(service, services, folder)
    known = {key: word.text for key, word in env.items()} | folder.variables
    image = expand_variables(service.text("image"), known)
    keys = ("command", "args") if folder.is_akash else ("entrypoint", "command")
    entry, given = (_expanded_words(service.get(key), known) for key in keys)
    nodes = [node for key in ("volumes", "tmpfs") if (node := service.get(key)) is not None]
    targets = " ".join(item.scalar or item.text("target") for node in nodes for item in node.list() or [node])
    shm = service.text("shm_size") or ("host" if service.text("ipc") == "host" else None)
    shm = shm or ("mounted" if "/dev/shm" in targets else None)
    memory = service.text("deploy", "resources", "limits", "memory") or service.text("mem_limit")
    # The name tells what a service builds whose command is vLLM's flags.
    named = image or (name if service.get("build") is not None and given and given[0].text.startswith("--") else "")
    if not given and not entry and re.search(r"(?m)^(?:CMD|ENTRYPOINT)\b", _dockerfile(service, folder).text):
        named = ""  # the Dockerfile tells what runs
    built = installed_releases(_dockerfile(service, folder).text)
    installed = min(built.pinned) if len(built.pinned) == 1 and not built.is_unpinned else ""
    gpus = _gpu_count(service, known)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    shown = expand_variables(visible.text, folder.variables) if visible else ""
    subjects = list(container_servers(service, named, entry, given, env, "compose"))
    if service.get("build") is not None and not any(isinstance(each, StartedServer) for each in subjects):
        subjects += _built_servers(name, service, env, folder)
    yield from change_servers(
        subjects,
        lambda server: replace(
            server,
            image=image or (server.image if server.read_as == "a Dockerfile" else ""),
            in_container=True,
            shm=shm,
            gpus=gpus,
            gpu_ids=_gpu_ids(service, known, gpus, shown),
            memory_limit_bytes=docker_bytes(memory),
            mounts=_mounts(service),
            published=tuple(_published(service, known)),
            other_env=_other_variables(service),
            has_no_gpu=_has_no_gpu(service) and folder.is_only_compose_file,
            start_limit=_health_limit(service),
            repeated_entry=None if service.get(keys[0]) else repeated_entry(image, entry, given),
            probes=_probes(service),
            profiles=tuple(item.scalar or "" for item in service.list("profiles")),
            read_as=f"compose service {name}",
            is_release_assumed=service.get("build") is not None,  # `image` is then the name of the built image
            installed=server.installed or installed,
        ),
    )


def _dockerfile(service: Node, folder: ComposeFolder) -> Text:
    """The Dockerfile that a service builds; an empty text where it builds none, or it is not there."""
    build = service.get("build")
    if build is None:
        return Text("", "")
    path = f"{build.scalar or build.text('context') or '.'}/{build.text('dockerfile') or 'Dockerfile'}"
    return Text(str(folder.path / path), folder.text(path))


def _built_servers(name: str, service: Node, env: Mapping[str, Word], folder: ComposeFolder) -> Iterator[Subject]:
    """The server of the Dockerfile that a service builds; without one, where a name is vLLM's image, its env alone."""
    build, place, source = service.get("build") or service, service.source.place, _dockerfile(service, folder)
    text = source.text
    is_run = service.get("command") is None and service.get("entrypoint") is None and build.get("target") is None
    known = {key: word.with_text(expand_variables(word.text, folder.variables)) for key, word in env.items()}
    subjects = dockerfile_subjects(source, env_with_places(known, place)) if is_run else ()
    found = [each for each in subjects if isinstance(each, StartedServer) and each.words]
    for server in found[-1:]:
        pinned = with_release(server, installed_releases(text), frozenset(), "dockerfile")
        yield replace(pinned, runs="compose", place=place(service.offset))
    args = (node.scalar or "" for node in build.list("args") or dict(build.items("args")).values())
    if not found and not (is_run and text) and any(map(is_server_image, (name, *args))):
        yield StartedServer("compose", (), env, place, place(service.offset))


def _expanded_words(node: Node | None, known: Mapping[str, str]) -> tuple[Word, ...]:
    """The words with ${VARIABLES} replaced by `known` values; Compose splits afterwards, so one may become several."""
    is_line = node is not None and node.scalar is not None
    expanded = ((word, expand_variables(word.text, known)) for word in compose_words(node))
    parts = ((word, text.split() if is_line and word.raw.startswith("$") else [text]) for word, text in expanded)
    return tuple(word.with_text(text) for word, texts in parts for text in texts)


def compose_words(node: Node | None) -> tuple[Word, ...]:
    """The words of a `command` or `entrypoint`: a list, or a shell line, split; LegroomError for an open quote."""
    if node is None:
        return ()
    if node.scalar is None:
        return tuple(item.word().with_text((item.scalar or "").replace("$$", "$")) for item in node.list())
    if node.style in ("|", ">"):
        words = [word for command in simple_commands(node.inner()) for word in command.words]
        text = node.source.text
        placed = words_found_in(text, (word.raw for word in words), node.offset, len(text))
        return tuple(at.with_text(word.text) for at, word in zip(placed, words, strict=True))
    try:
        texts = shlex.split(node.scalar)
    except ValueError:
        where = f"at line {node.source.place(node.offset).line}"
        raise LegroomError(f"has a command with a quote that is never closed {where}", "check its quotes") from None
    return words_found_in(node.source.text, texts, node.offset, node.end + 1)


def compose_env(node: Node | None) -> dict[str, Word]:
    """The variables with a value in `environment`: a mapping, or a list of `NAME=value`."""
    if node is None:
        return {}
    env = {name: value.word() for name, value in node.items() if value.scalar is not None}
    for item in node.list():
        name, equals, value_text = (item.scalar or "").partition("=")
        env |= {name: item.word().with_text(value_text)} if equals else {}
    return env


def _mounts(service: Node) -> tuple[Mount, ...] | None:
    """The volumes of a service; None where they are not known: in an excerpt, or other files may add some."""
    is_whole = any(service.get(key) for key in ("ports", "expose", "restart", "container_name"))
    if not is_whole or service.get("configs") or service.get("volumes_from"):
        return None
    items = [(item, item.text("target"), item.text("type") == "bind") for item in service.list("volumes")]
    return tuple(
        Mount(target, "host" if is_host else "volume") if target else mount_of(item.scalar or "")
        for item, target, is_host in items
    )


def _published(service: Node, known: Mapping[str, str]) -> Iterator[PublishedPort]:
    """The ports that the host forwards to a service, `known` variables filled in; none if it uses host networking."""
    for item in service.list("ports") if service.text("network_mode") != "host" else ():
        short = ":".join(filter(None, (item.text("host_ip"), item.text("published") or "0", item.text("target"))))
        yield published_port(expand_variables(item.scalar or short, known), item.source.place(item.offset))


def _other_variables(service: Node) -> frozenset[str]:
    """Names of a service's variables whose values are not in the file; `*` if other files may set any variable."""
    names = {item.scalar or "" for item in service.list("environment")}
    names |= {name for name, value in service.items("environment") if value.scalar is None}
    hidden = {"*"} if service.get("env_file") or service.get("secrets") or service.get("extends") else set()
    return frozenset(names | hidden)


_GIVES_GPUS = ("gpus", "runtime", "devices", "privileged", "device_cgroup_rules", "extends")
_RESERVED = ("deploy", "resources", "reservations")


def _has_no_gpu(service: Node) -> bool:
    """Whether nothing in a service can give its container a GPU."""
    reserved = [service.get(*_RESERVED, key) for key in ("devices", "generic_resources")]
    return reserved == [None, None] and not any(service.get(key) for key in _GIVES_GPUS)


def _gpu_count(service: Node, known: Mapping[str, str]) -> int | None:
    """The number of GPUs that a service reserves; None for no reservation, `all`, or a variable not in `known`."""
    for device in service.list(*_RESERVED, "devices"):
        if device.get("device_ids") is not None:
            named = ",".join(expand_variables(item.scalar or "", known) for item in device.list("device_ids"))
            return None if "$" in named else len([card for card in named.split(",") if card.strip()])
        count = expand_variables(device.text("count"), known)
        if count.isdecimal():
            return int(count)
    return None


def _gpu_ids(service: Node, known: Mapping[str, str], count: int | None, shown: str) -> tuple[int, ...]:
    """Indexes of the GPUs that a service uses: the reserved ones (`count`), of these CUDA_VISIBLE_DEVICES (`shown`)."""
    devices = service.list(*_RESERVED, "devices")
    if not devices and service.text("runtime") != "nvidia":
        return ()
    listed = [item.scalar or "" for device in devices for item in device.list("device_ids")]
    names = expand_variables(",".join(listed), known) or ",".join(map(str, range(count or _MOST_GPUS)))
    if not re.fullmatch(r"[\d,]+", names) or not re.fullmatch(r"[\d, ]*", shown):
        return ()
    ids = [int(name) for name in names.split(",") if name]
    chosen = [int(part) for part in shown.split(",") if part.strip()] or range(len(ids))
    return tuple(ids[index] for index in chosen if index < len(ids))


def _probes(service: Node) -> tuple[Probe, ...]:
    """The health check of a service as its only probe; empty without one."""
    test = service.get("healthcheck", "test")
    if test is None:
        return ()
    words = [item.scalar or "" for item in test.list()][1:] or split_words(test.scalar or "")
    if len(words) == 1:  # ["CMD-SHELL", "curl ..."]
        words = ["sh", "-c", *words]
    return (probe_of_words("health", words, test.source.place(test.offset)),)


def _health_limit(service: Node) -> TimeLimit | None:
    """The seconds after which Compose marks a starting service unhealthy; None without an enabled health check."""
    check = service.get("healthcheck")
    if check is None or check.text("disable") == "true":
        return None
    period = seconds_of_span(check.text("start_period")) or 0.0
    interval = seconds_of_span(check.text("interval")) or 30.0
    retries = float_at(check, "retries", 3.0)
    told = check.get("start_period") or check
    return TimeLimit(period + interval * retries, check.source.place(told.offset))


_ENV_LINE = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(?:\"([^\"\n]*)\"|'([^'\n]*)'|([^#\n]*))", re.MULTILINE)


def env_file_variables(text: str) -> dict[str, Word]:
    """The variables of an env file's text; names of secrets are left out."""
    every = {
        line[1]: Word((line[2] or line[3] or line[4] or "").strip(), line.start(1)) for line in _ENV_LINE.finditer(text)
    }
    return {name: word for name, word in every.items() if not is_secret(name, word.text)}


def env_file_server(source: Text) -> tuple[StartedServer, ...]:
    """A server without command, with an env file's variables; empty where none of them is vLLM's or PyTorch's."""
    env = env_file_variables(source.text)
    if not any(name.startswith(("VLLM_", "PYTORCH_")) for name in env):
        return ()
    return (StartedServer("config", (), env, source.place, source.place(0)),)
