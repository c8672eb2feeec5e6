"""Deployments written as YAML: Kubernetes manifests, compose files, vLLM's own --config files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from legroom.deployments.plain_containers import visible_gpus, with_entrypoint
from legroom.deployments.plain_shell import basename, expand, server_commands, server_start
from legroom.errors import LegroomError
from legroom.facts.flags import all_flag_names, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass, field

_GPU_RESOURCES = re.compile(r"(nvidia|amd|gpu\.intel)\.com/(gpu|mig-.*|i915|xe)")
_MAX_NODES = 200_000
_DEEPEST = 200
_SHELLS = ("sh", "bash", "zsh", "dash", "ash")


@dataclass(frozen=True)
class Found:
    """One server in a file: its words, and what stands around them."""

    words: tuple[str, ...]
    read_as: str
    image: str = ""
    env: dict[str, str] = field(default_factory=dict)
    gpus: int | None = None


def load_documents(text: str, name: str) -> list[Any]:
    """Every YAML document of a text; templates that were never rendered are refused."""
    import yaml  # noqa: PLC0415 - only files need it

    if re.search(r"\{\{.*?\}\}|\{%", text):
        raise LegroomError(
            f"{name} is a template (it holds {{{{ ... }}}}), not a manifest",
            "render it first, for example with `helm template`, and pass the result",
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if _depth(yaml.parse(text, Loader=loader)) > _DEEPEST:
            raise LegroomError(f"{name} is nested too deeply for a deployment file", "check its brackets")
        return [document for document in yaml.load_all(text, Loader=loader) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise LegroomError(f"{name} is not valid YAML{line}", "check its indentation and quotes") from None


def _depth(events: Iterable[Any]) -> int:
    """How deeply a YAML text is nested. PyYAML's C loader recurses with it, and a text of brackets would end it."""
    depth = deepest = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") - name.endswith("EndEvent")
        deepest = max(deepest, depth)
        if deepest > _DEEPEST:
            break
    return deepest


def servers_in_documents(documents: list[Any], release: Release) -> Iterator[Found]:
    """Every vLLM server that the documents start."""
    for document in documents:
        if not isinstance(document, Mapping):
            continue
        services = document.get("services")
        if isinstance(services, Mapping) and "apiVersion" not in document:
            for name, service in services.items():
                if isinstance(service, Mapping):
                    yield from _service(str(name), service)
        elif "apiVersion" in document or "kind" in document or "spec" in document or "containers" in document:
            yield from _kubernetes(document)
        elif _is_vllm_config(document):
            yield Found(config_words(document, release), "a vLLM config file")


def _is_vllm_config(document: Mapping[str, Any]) -> bool:
    known = set(all_flag_names())
    keys = ["--" + str(key).replace("_", "-") for key in document]
    return bool(keys) and sum(key in known for key in keys) * 2 >= len(keys)


def config_words(document: Mapping[str, Any], release: Release) -> tuple[str, ...]:
    """A --config file as the words vLLM turns it into."""
    words: list[str] = ["vllm", "serve"]
    table = flags_of(release)
    for key, value in document.items():
        flag = "--" + str(key).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            if value:
                words.append(flag)
            elif flag in table and table[flag].kind == "bool":
                words.append("--no-" + flag[2:])
        elif isinstance(value, list):
            words += [flag, *(str(item) for item in value)] if value else []
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value, default=str)]
        else:
            words += [flag, str(value)]
    return tuple(words)


def _kubernetes(document: Mapping[str, Any]) -> Iterator[Found]:
    kind = str(document.get("kind") or "manifest")
    metadata = document.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
    read_as = f"Kubernetes {kind} {name}".rstrip()
    group = _find_key(document.get("spec"), "leaderWorkerTemplate")
    size = group.get("size", 1) if isinstance(group, Mapping) else 1
    pods = size if isinstance(size, int) and 0 < size < 1000 else 1
    for container in _containers(document):
        found = _container(container, read_as)
        if found:
            gpus = found.gpus * pods if found.gpus is not None else None
            yield Found(found.words, found.read_as, found.image, found.env, gpus)


def _find_key(node: Any, key: str) -> Any:
    return node.get(key) if isinstance(node, Mapping) else None


def _containers(root: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping that starts something: with a command, arguments, or a vLLM image."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen or len(seen) > _MAX_NODES:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            starts = isinstance(node.get("args"), list) or isinstance(node.get("command"), list)
            if starts or "vllm" in str(node.get("image", "")).lower():
                yield node
            stack += [value for value in reversed(list(node.values())) if isinstance(value, Mapping | list)]
        elif isinstance(node, list):
            stack += [value for value in reversed(node) if isinstance(value, Mapping | list)]


def _container(container: Mapping[str, Any], read_as: str) -> Found | None:
    env = _environment(container.get("env"))
    image = str(container.get("image") or "")
    program = tuple(expand(str(word), env) for word in _listed(container.get("command")))
    arguments = tuple(expand(str(word), env) for word in _listed(container.get("args")))
    if isinstance(container.get("modelFormat"), Mapping):
        arguments = _kserve_arguments(arguments)
        program = program or ("vllm", "serve")
    words = _server_words(with_entrypoint(image, program, arguments), env)
    if words is None:
        return None
    own, env = words
    gpus = _gpu_resources(container.get("resources"))
    return Found(own, read_as, image, env, gpus if gpus is not None else visible_gpus(env))


def _server_words(words: tuple[str, ...], env: dict[str, str]) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """The server inside a container's words, also behind `sh -c "..."`."""
    start = server_start(words)
    if start is not None:
        return words[start:], env
    if any(basename(word) in _SHELLS for word in words[:3]) or any(" vllm serve" in f" {word}" for word in words):
        for word in words:
            if "vllm" in word and any(character.isspace() for character in word.strip()):
                for found in server_commands(word, env):
                    return found.words, found.env
    return None


def _kserve_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """KServe's own names for the model and the name it is served under."""
    names = {"--model_id": "--model", "--model-id": "--model", "--model_name": "--served-model-name",
             "--model-name": "--served-model-name"}  # fmt: skip
    renamed = []
    for word in arguments:
        head, equals, value = word.partition("=")
        renamed.append(names.get(head, head) + equals + value)
    return tuple(renamed)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [item for item in value if isinstance(item, str | int | float | bool)]
    return value.split() if isinstance(value, str) else []


def _environment(value: Any) -> dict[str, str]:
    """`[{name, value}]`, `{NAME: value}` or `["NAME=value"]`."""
    if isinstance(value, Mapping):
        return {str(name): _text(content) for name, content in value.items() if content is not None}
    env: dict[str, str] = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, Mapping) and "name" in item and item.get("value") is not None:
            env[str(item["name"])] = _text(item["value"])
        elif isinstance(item, str) and "=" in item:
            name, _, content = item.partition("=")
            env[name] = content
    return env


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gpu_resources(resources: Any) -> int | None:
    for side in ("limits", "requests"):
        amounts = _find_key(resources, side)
        if isinstance(amounts, Mapping):
            for name, amount in amounts.items():
                if _GPU_RESOURCES.fullmatch(str(name)) and str(amount).isdecimal() and len(str(amount)) < 5:
                    return int(str(amount))
    return None


def _service(name: str, service: Mapping[str, Any]) -> Iterator[Found]:
    import shlex  # noqa: PLC0415 - only compose files need it

    env = _environment(service.get("environment"))
    image = expand(str(service.get("image") or ""), env)
    parts = []
    for key in ("entrypoint", "command"):
        value = service.get(key)
        try:
            words = shlex.split(value) if isinstance(value, str) else _listed(value)
        except ValueError:
            raise LegroomError(f"the {key} of service {name} has a quote that is never closed", "") from None
        parts.append(tuple(expand(str(word), env) for word in words))
    words_and_env = _server_words(with_entrypoint(image, parts[0], parts[1]), env)
    if words_and_env:
        own, env = words_and_env
        gpus = _compose_gpus(service)
        yield Found(own, f"compose service {name}", image, env, gpus if gpus is not None else visible_gpus(env))


def _compose_gpus(service: Mapping[str, Any]) -> int | None:
    node: Any = service.get("deploy")
    for key in ("resources", "reservations", "devices"):
        node = _find_key(node, key)
    for device in node if isinstance(node, list) else []:
        if isinstance(device, Mapping):
            ids = device.get("device_ids")
            if isinstance(ids, list):
                return len(ids)
            count = device.get("count")
            if isinstance(count, int) and 0 < count < 10_000:
                return count
    return None
