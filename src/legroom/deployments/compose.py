"""Compose files: their services, with what they extend and the variables that lie beside them."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from legroom.deployments.containers import docker_bytes
from legroom.deployments.env_file import variables_of
from legroom.deployments.kubernetes import number, servers
from legroom.deployments.server_words import expand
from legroom.deployments.shell.scan import Word
from legroom.deployments.shell.script import DOCKER_STOP_S
from legroom.deployments.shell.words import commands
from legroom.deployments.subjects import At, Invoked, StartedServer, with_servers
from legroom.deployments.text import Text, read_text
from legroom.deployments.unit import span_s
from legroom.deployments.yaml_nodes import Node, load_nodes
from legroom.errors import LegroomError

_DEEPEST = 8
_FROM_ELSEWHERE = ("image", "ipc", "shm_size", "tmpfs", "volumes", "stop_grace_period")
"""What a service takes from one in another file; that file's own commands are its own matter."""


def is_compose(document: Node) -> bool:
    services = document.get("services")
    return services is not None and isinstance(services.values, dict) and document.get("apiVersion") is None


def compose_subjects(document: Node) -> Iterator[StartedServer | Invoked]:
    services = document.get("services") or document
    folder = _ComposeFolder(document)
    for name, service in services.items():
        yield from _service(name, service, services, folder)


class _ComposeFolder:
    """The files in the folder of a compose file, where there is one."""

    def __init__(self, document: Node) -> None:
        self._folder = Path(document.source.path).parent
        self._is_file = Path(document.source.path).is_file()
        self.variables = {name: word.text for name, word in variables_of(self.text(".env")).items()}

    def text(self, name: str) -> str:
        """A file's text, empty where it cannot be read."""
        try:
            return read_text(self._folder / name) if self._is_file and name else ""
        except LegroomError:
            return ""

    def service(self, file: str, name: str) -> Node | None:
        """A service of another compose file."""
        try:
            documents = load_nodes(Text(file, self.text(file)))
        except LegroomError:
            return None
        return documents[0].get("services", name) if documents else None


def _extended(service: Node, services: Node, folder: _ComposeFolder, depth: int = 0) -> tuple[Node, dict[str, Word]]:
    """A service with what it extends, its own settings first, and its environment."""
    extends = service.get("extends")
    name = (extends.scalar or extends.text("service")) if extends is not None else ""
    file = extends.text("file") if extends is not None else ""
    base = folder.service(file, name) if file else services.get(name)
    env = {**_env_files(service, folder), **compose_env(service.get("environment"))}
    if extends is None or base is None or depth >= _DEEPEST or base is service:
        return service, env
    base, base_env = _extended(base, services, folder, depth + 1)
    inherited = dict(base.items())
    if file:
        inherited = {key: value for key, value in inherited.items() if key in _FROM_ELSEWHERE}
        base_env = {key: Word(word.text, extends.offset) for key, word in base_env.items()}
    merged = copy.copy(service)
    merged.values = inherited | dict(service.items())
    return merged, base_env | env


def _env_files(service: Node, folder: _ComposeFolder) -> dict[str, Word]:
    """What `env_file` brings in, told at its place in the compose file."""
    env: dict[str, Word] = {}
    node = service.get("env_file")
    for item in (node.list() or [node]) if node is not None else ():
        variables = variables_of(folder.text(item.scalar or item.text("path")))
        env |= {name: Word(word.text, item.offset) for name, word in variables.items()}
    return env


def _service(name: str, service: Node, services: Node, folder: _ComposeFolder) -> Iterator[StartedServer | Invoked]:
    service, env = _extended(service, services, folder)
    known = {key: word.text for key, word in env.items()} | folder.variables
    image = expand(service.text("image"), known)
    entry, given = (
        tuple(
            expanded
            for word in compose_words(service.get(key))
            for expanded in _expanded(word, service.get(key), known)
        )
        for key in ("entrypoint", "command")
    )
    shm = service.text("shm_size") or ("host" if service.text("ipc") == "host" else None) or _mounted_shm(service)
    yield from with_servers(
        servers(service, image, entry, given, env, "compose"),
        lambda server: replace(
            server,
            image=image,
            in_container=True,
            shm=shm,
            gpus=_compose_cards(service, known),
            memory_limit_bytes=docker_bytes(
                service.text("deploy", "resources", "limits", "memory") or service.text("mem_limit")
            ),
            start_limit=_health_limit(service),
            stop_limit=_stop_limit(service),
            read_as=f"compose service {name}",
            is_release_assumed=service.get("build") is not None,  # then the image's name is only what it is called
        ),
    )


def _expanded(word: Word, node: Node | None, known: Mapping[str, str]) -> tuple[Word, ...]:
    """A word with its variables put in. Compose does that before it splits a text: one word may become several."""
    text = expand(word.text, known)
    is_split = node is not None and node.scalar is not None and word.raw.startswith("$")
    return tuple(map(word.with_text, text.split())) if is_split else (word.with_text(text),)


def compose_words(node: Node | None) -> tuple[Word, ...]:
    """A list of words, or a text that is split into them."""
    if node is None:
        return ()
    if node.scalar is None:
        return tuple(item.word().with_text((item.scalar or "").replace("$$", "$")) for item in node.list())
    if node.style in ("|", ">"):
        inner = node.inner()
        raw = node.source.text
        placed = []
        cursor = node.offset
        for command in commands(inner):
            for word in command.words:
                cursor = max(raw.find(word.raw, cursor), cursor)
                placed.append(Word(word.text, cursor, word.raw))
        return tuple(placed)
    try:
        texts = shlex.split(node.scalar)
    except ValueError:
        line = node.source.place(node.offset).line
        raise LegroomError(
            f"has a command with a quote that is never closed at line {line}", "check its quotes"
        ) from None
    placed, cursor = [], node.offset
    for text in texts:
        at = node.source.text.find(text, cursor, node.end + 1)
        cursor = at if at >= 0 else cursor
        placed.append(Word(text, cursor, text))
    return tuple(placed)


def compose_env(node: Node | None) -> dict[str, Word]:
    """`NAME: value`, or a list of `NAME=value`."""
    env: dict[str, Word] = {}
    if node is None:
        return env
    for name, value in node.items():
        if value.scalar is not None:
            env[name] = value.word()
    for item in node.list():
        name, equals, value_text = (item.scalar or "").partition("=")
        if equals:
            env[name] = item.word().with_text(value_text)
    return env


def _mounted_shm(service: Node) -> str | None:
    for key in ("volumes", "tmpfs"):
        node = service.get(key)
        for item in (node.list() or [node]) if node else ():
            if "/dev/shm" in (item.scalar or item.text("target")):
                return "mounted"
    return None


def _compose_cards(service: Node, known: Mapping[str, str]) -> int | None:
    """How many GPUs a service gets; None where a variable says it, for one of them may hold several ids (`0,1`)."""
    devices = service.get("deploy", "resources", "reservations", "devices")
    for device in devices.list() if devices else ():
        ids = device.get("device_ids")
        if ids is not None:
            named = ",".join(expand(item.scalar or "", known) for item in ids.list())
            return None if "$" in named else len([card for card in named.split(",") if card.strip()])
        count = expand(device.text("count"), known)
        if count.isdecimal():
            return int(count)
    return None


def _health_limit(service: Node) -> At | None:
    """Compose itself restarts nothing; what depends on a healthy service gives up after this."""
    check = service.get("healthcheck")
    if check is None or check.text("disable") == "true":
        return None
    period = span_s(check.text("start_period")) or 0.0
    interval = span_s(check.text("interval")) or 30.0
    retries = number(check, "retries", 3.0)
    return At(period + interval * retries, check.source.place(check.offset))


def _stop_limit(service: Node) -> At:
    node = service.get("stop_grace_period")
    seconds = span_s(node.scalar or "") if node else None
    if node is None or seconds is None:
        return At(DOCKER_STOP_S, service.source.place(service.offset))
    return At(seconds, node.source.place(node.offset))
