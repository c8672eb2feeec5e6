"""Kubernetes manifests and vLLM's own config files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from legroom.deployments.plain_containers import with_entrypoint
from legroom.deployments.plain_shell import expand, server_start
from legroom.deployments.shell.scan import Word, placed_env
from legroom.deployments.shell.script import runs_another_program, subjects_of
from legroom.deployments.shell.words import Command, commands
from legroom.deployments.subjects import At, Found, Invoked, Runs, Started, Subject
from legroom.deployments.text import Text
from legroom.deployments.yaml_nodes import Node
from legroom.facts.flags import all_flag_names, flags_of
from legroom.facts.releases import Release

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
        for key in ("initContainers", "containers"):
            containers = node.get(key)
            for container in containers.list() if containers else ():
                yield from _container(container, node, container.text("image"))
        alone, model = node.get("container"), node.get("model")
        if alone is not None and isinstance(alone.values, dict):  # a step of an Argo workflow
            yield from _container(alone, node, alone.text("image"))
        if model is not None and model.text("modelFormat", "name").lower() == "vllm":  # KServe with a runtime of vLLM
            yield from _container(model, node, model.text("image") or "vllm")


def _container(container: Node, pod: Node, image: str) -> Iterator[Subject]:
    env = list_env(container.get("env"))
    entry, given = _word_list(container.get("command"), env), _word_list(container.get("args"), env)
    if more := env.get("VLLM_ADDITIONAL_ARGS"):  # KServe's own way to add flags
        given += tuple(Word(text, more.offset, text) for text in more.text.split())
    for hook in ("preStop", "postStart"):
        command = container.get("lifecycle", hook, "exec", "command")
        yield from scripts(command, env) if command is not None else ()
    for server in servers(container, image, entry, given, env, "kubernetes"):
        if isinstance(server, Started):
            yield replace(
                server, image=image, in_container=True, shm=_pod_shm(container, pod), gpus=_cards(container),
                start_limit=_start_limit(container), stop_limit=_grace(container, pod),
            )  # fmt: skip
        else:
            yield server


def servers(
    owner: Node, image: str, entry: tuple[Word, ...], given: tuple[Word, ...], env: Mapping[str, Word], runs: Runs
) -> Iterator[Started | Invoked]:
    """The server that a container's entry point and arguments start, or what its scripts run."""
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
            yield from scripts(node, env, runs) if node is not None else ()


def scripts(node: Node, env: Mapping[str, Word], runs: Runs = "kubernetes") -> Iterator[Started | Invoked]:
    """`["sh", "-c", "vllm serve ..."]`: the text of the last word, read as a script."""
    for item in node.list() or ([node] if node.scalar else []):
        text = item.scalar or ""
        if any(character.isspace() for character in text.strip()):
            source = item.inner()
            outer = placed_env(env, item.source.place)
            for command in commands(source):
                yield from subjects_of(source, Command(command.words, {**outer, **command.env}, command.pipeline), runs)


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
