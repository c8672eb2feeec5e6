"""Kubernetes manifests, compose files and vLLM's own config files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping

from legroom.exports.lint.readers.shell import DOCKER_STOP_S, runs_another_program, subjects_of
from legroom.exports.lint.readers.unit import span_s
from legroom.exports.lint.shell_scan import Word
from legroom.exports.lint.shell_words import Command, commands
from legroom.exports.lint.subjects import At, Found, Invoked, Runs, Started, Subject
from legroom.exports.lint.text import Text
from legroom.exports.lint.yaml_nodes import Node
from legroom.facts.flags import all_flag_names, flags_of
from legroom.facts.releases import Release
from legroom.vllm.containers import with_entrypoint
from legroom.vllm.shell import expand, server_start

_GPU = re.compile(r"(nvidia|amd|gpu\.intel)\.com/(gpu|mig-.*|i915|xe)")
ANCHORS = frozenset({
    "--model", "--tensor-parallel-size", "--max-model-len", "--gpu-memory-utilization", "--max-num-seqs",
    "--served-model-name", "--max-num-batched-tokens", "--kv-cache-dtype",
})  # fmt: skip
"""Flags that nearly every server of vLLM is given one of."""
GRACE_S = 30.0
"""terminationGracePeriodSeconds unless told."""
_PERIOD_S, _FAILURES = 10.0, 3.0
"""Kubernetes' defaults of a probe."""


def is_kubernetes(document: Node) -> bool:
    """Whether a YAML document is an object of Kubernetes."""
    return document.get("apiVersion") is not None and document.get("kind") is not None


def is_compose(document: Node) -> bool:
    """Whether it is a compose file."""
    services = document.get("services")
    return services is not None and isinstance(services.values, dict) and document.get("apiVersion") is None


def is_config(document: Node) -> bool:
    """Whether most of its keys are flags of vLLM, and one is among those that every such file has."""
    keys = ["--" + key.replace("_", "-") for key, _ in document.items()]
    known = set(all_flag_names())
    return bool(ANCHORS & set(keys)) and sum(key in known for key in keys) * 3 >= 2 * len(keys)


def read_kubernetes(document: Node) -> Found:
    """Every server that its pods start."""
    return Found(tuple(_pods(document)))


def _pods(document: Node) -> Iterator[Subject]:
    for node in document.walk():
        containers = node.get("containers")
        if containers is None or not isinstance(containers.values, list):
            continue
        for container in containers.list():
            yield from _container(container, node)


def _container(container: Node, pod: Node) -> Iterator[Subject]:
    env = list_env(container.get("env"))
    entry, given = _word_list(container.get("command"), env), _word_list(container.get("args"), env)
    image = container.text("image")
    for hook in ("preStop", "postStart"):
        command = container.get("lifecycle", hook, "exec", "command")
        yield from _scripts(command, env) if command is not None else ()
    for server in _servers(container, image, entry, given, env, "kubernetes"):
        if isinstance(server, Started):
            yield Started(
                server.runs, server.words, server.env, server.locate, server.place, image, True,
                _pod_shm(container, pod), _cards(container), _start_limit(container), _grace(container, pod),
            )  # fmt: skip
        else:
            yield server


def _servers(
    owner: Node, image: str, entry: tuple[Word, ...], given: tuple[Word, ...], env: Mapping[str, Word], runs: Runs
) -> Iterator[Started | Invoked]:
    texts = with_entrypoint(image, tuple(word.text for word in entry), tuple(word.text for word in given))
    every = (*entry, *given)
    missing = max(len(texts) - len(every), 0)
    placed = (
        tuple(Word(text, owner.offset, text) for text in texts[:missing]) + every[len(every) - (len(texts) - missing) :]
    )
    at = server_start(tuple(word.text for word in placed))
    if at is not None and not runs_another_program(image, texts[at:]):
        yield Started(runs, placed[at:], env, owner.source.place, owner.source.place(placed[at].offset), image)
    elif every and at is None:
        for node in (owner.get("command"), owner.get("args")):
            yield from _scripts(node, env, runs) if node is not None else ()


def _scripts(node: Node, env: Mapping[str, Word], runs: Runs = "kubernetes") -> Iterator[Started | Invoked]:
    """`["sh", "-c", "vllm serve ..."]`: the text of the last word, read as a script."""
    for item in node.list() or ([node] if node.scalar else []):
        text = item.scalar or ""
        if any(character.isspace() for character in text.strip()):
            source = item.inner()
            for command in commands(source):
                yield from subjects_of(source, Command(command.words, {**env, **command.env}, command.pipeline), runs)


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


def _cards(container: Node) -> int | None:
    for side in ("limits", "requests"):
        amounts = container.get("resources", side)
        for name, amount in amounts.items() if amounts else ():
            if _GPU.fullmatch(name) and (amount.scalar or "").isdecimal():
                return int(amount.scalar or 0)
    return None


def _start_limit(container: Node) -> At | None:
    """How long a pod may load: its startup probe, else its liveness probe."""
    startup, liveness = container.get("startupProbe"), container.get("livenessProbe")
    for probe in (startup, liveness):
        if probe is not None:
            period = _number(probe, "periodSeconds", _PERIOD_S)
            seconds = _number(probe, "initialDelaySeconds", 0.0) + period * _number(
                probe, "failureThreshold", _FAILURES
            )
            return At(seconds, probe.source.place(probe.offset))
    return None


def _number(node: Node, key: str, default: float) -> float:
    try:
        return float(node.text(key) or default)
    except ValueError:
        return default


def _grace(container: Node, pod: Node) -> At:
    node = pod.get("terminationGracePeriodSeconds")
    if node is None or node.scalar is None:
        return At(GRACE_S, container.source.place(container.offset))
    return At(_number(pod, "terminationGracePeriodSeconds", GRACE_S), node.source.place(node.offset))


def read_compose(document: Node) -> Found:
    """Every server of a compose file."""
    return Found(
        tuple(subject for _, service in (document.get("services") or document).items() for subject in _service(service))
    )


def _service(service: Node) -> Iterator[Started | Invoked]:
    env = compose_env(service.get("environment"))
    image = expand(service.text("image"), {name: word.text for name, word in env.items()})
    entry, given = compose_words(service.get("entrypoint")), compose_words(service.get("command"))
    for found in _servers(service, image, entry, given, env, "compose"):
        if isinstance(found, Started):
            shm = (
                service.text("shm_size") or ("host" if service.text("ipc") == "host" else None) or _mounted_shm(service)
            )
            yield Started(
                found.runs, found.words, found.env, found.locate, found.place, image, True, shm,
                _compose_cards(service), _health_limit(service), _stop_limit(service),
            )  # fmt: skip
        else:
            yield found


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
        return ()
    placed, cursor = [], node.offset
    for text in texts:
        found = node.source.text.find(text, cursor, node.end + 1)
        cursor = found if found >= 0 else cursor
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


def _compose_cards(service: Node) -> int | None:
    devices = service.get("deploy", "resources", "reservations", "devices")
    for device in devices.list() if devices else ():
        ids = device.get("device_ids")
        if ids is not None:
            return len(ids.list())
        if device.text("count").isdecimal():
            return int(device.text("count"))
    return None


def _health_limit(service: Node) -> At | None:
    """Compose itself restarts nothing; what depends on a healthy service gives up after this."""
    check = service.get("healthcheck")
    if check is None or check.text("disable") == "true":
        return None
    period = span_s(check.text("start_period")) or 0.0
    interval = span_s(check.text("interval")) or 30.0
    retries = _number(check, "retries", 3.0)
    return At(period + interval * retries, check.source.place(check.offset))


def _stop_limit(service: Node) -> At:
    node = service.get("stop_grace_period")
    seconds = span_s(node.scalar or "") if node else None
    if node is None or seconds is None:
        return At(DOCKER_STOP_S, service.source.place(service.offset))
    return At(seconds, node.source.place(node.offset))


def read_config(document: Node, release: Release) -> Found:
    """A --config file as the command line that vLLM makes of it."""
    table = flags_of(release)
    words = [Word("vllm", document.offset), Word("serve", document.offset)]
    for key, value in document.items():
        flag = "--" + key.replace("_", "-")
        place = document.source.text.rfind(key, 0, value.offset)
        offset = place if place >= 0 else value.offset
        text = value.scalar
        if text is not None and value.style == "" and text.lower() in ("true", "false"):
            if text.lower() == "true":
                words.append(Word(flag, offset))
            elif flag in table and table[flag].kind == "bool":
                words.append(Word("--no-" + flag[2:], offset))
            elif flag not in table:
                words.append(Word(flag, offset))
        elif text is not None:
            if text.lower() not in ("null", "~", ""):
                words += [Word(flag, offset), Word(text, value.offset)]
        elif isinstance(value.values, dict):
            words += [Word(flag, offset), Word(json.dumps(_plain(value)), value.offset)]
        elif value.list():
            words += [Word(flag, offset), *(item.word() for item in value.list())]
    source: Text = document.source
    place_of = source.place
    return Found((Started("config", tuple(words), {}, place_of, place_of(document.offset)),))


def _plain(node: Node) -> object:
    if isinstance(node.values, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node.values, list):
        return [_plain(item) for item in node.list()]
    return node.scalar
