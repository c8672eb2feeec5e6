"""YAML of other tools: servers, scripts and engine settings anywhere in it. SkyPilot tasks, values of Helm charts, Ray
Serve configs, playbooks and pipelines have no common schema, so only vLLM's own commands and settings are
recognized."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from legroom.deployments import model_resources as resources
from legroom.deployments.compose_reader import compose_env, compose_words
from legroom.deployments.container_images import flag_names, kubernetes_bytes
from legroom.deployments.file_kinds import Kind, kind_by_first_line, kind_of
from legroom.deployments.kubernetes_reader import env_list, gpu_limit, possible_gpus, start_limit
from legroom.deployments.markdown import FENCE, START
from legroom.deployments.server_words import CONTAINER_TOOLS, basename, server_start
from legroom.deployments.shell.lexer import Word, env_with_places, serve_words
from legroom.deployments.shell.shell_script import read_shell
from legroom.deployments.source_text import Text
from legroom.deployments.subjects import StartedServer, Subject
from legroom.deployments.vllm_config import config_server, is_config
from legroom.deployments.yaml_nodes import Node
from legroom.facts import pattern
from legroom.facts.bundled import find
from legroom.facts.flags import all_flag_names
from legroom.facts.gpus import is_known_gpu
from legroom.facts.model_sources import is_hub_id
from legroom.facts.releases import Release
from legroom.records import dataclass, field

_ARGUMENTS, _COMPANIONS = pattern("other_yaml.arguments"), pattern("other_yaml.companions")
_SETTINGS = re.compile(r"vllm|(engine|vllm|llm|server|serve)[_-]?(kwargs|args|config|params)", re.IGNORECASE)
_VARIABLES = ("env", "envs", "environment", "env_vars")
_COMMANDS = ("command", "args")
_OF_CONTAINER = ("resources", "startupProbe", "livenessProbe")
_CARD_KEYS = ("accelerator_type", "acceleratorType", "gpu_type", "gpuType", "resource_type")
_SCRIPTS = (" run", " setup")  # Keys of scripts in SkyPilot's tasks and in workflows.
_ABOUT_VLLM = pattern("other_yaml.about_vllm")
_RECIPE = "vllm recipe"
_OMNI_STAGE = "model_stage"  # A key of vLLM-Omni's stages, which have other settings than vLLM.
_LOOKS_LIKE_YAML = re.compile(r"\s*(#[^\n]*\n\s*)*(- )?[A-Za-z_][\w.-]*:(\s|$)")


@dataclass(frozen=True)
class _Scope:
    """The keys, image and variables of the mappings around a value."""

    keys: str = ""
    key: str = ""
    """The nearest key as it is written."""
    image: str = ""
    env: Mapping[str, Word] = field(default_factory=dict)
    holder: Node | None = None
    """The nearest mapping around that has resources or probes."""

    def inside(self, node: Node) -> "_Scope":
        """The scope inside `node`: with the node's image, if it has one, and its variables added to those around it."""
        env = dict(self.env)
        for key in _VARIABLES:
            env |= {**compose_env(node.get(key)), **env_list(node.get(key))}
        holder = node if any(node.get(key) is not None for key in _OF_CONTAINER) else self.holder
        return _Scope(self.keys, self.key, _image_name(node) or self.image, env, holder)

    def given_to(self, server: StartedServer) -> StartedServer:
        """The server with the GPUs, memory limit and start limit of its container's mapping; unchanged without one."""
        holder = self.holder
        if holder is None:
            return server
        name, _colon, count = holder.text("resources", "accelerators").partition(":")  # SkyPilot's `H100:8`
        if name and is_known_gpu(name) and holder.get("num_nodes") is None:
            return replace(server, gpu_names=(name,), gpus=int(count) if count.isdecimal() else 1)
        return replace(
            server,
            gpus=gpu_limit(holder),
            memory_limit_bytes=kubernetes_bytes(holder.text("resources", "limits", "memory")),
            start_limit=start_limit(holder),
        )


def other_subjects(document: Node, release: Release) -> Iterator[Subject]:
    """Servers and commands anywhere in a YAML document that is neither compose, Kubernetes nor a vLLM config."""
    # vLLM-Omni's recipes have other flags.
    is_recipe = document.get("model", "min_vllm_version") is not None and "omni" not in document.source.text.lower()
    pending = [(document, _Scope(_RECIPE if is_recipe else ""))]
    while pending:
        node, scope = pending.pop()
        if isinstance(node.values, dict):
            scope = scope.inside(node)
            if resources.is_kubeai_model(node):
                yield resources.kubeai_server(node)
                continue
            if resources.is_model_spec(node):
                yield resources.model_spec_server(node)
                continue
            if node.get("model_loading_config") is not None:
                yield _ray_llm_server(node, release)
                continue
            yield from _server_of_arguments(node, scope)
            for key, value in node.items():  # `engine_kwargs:` and the like, whose keys are flags
                if _SETTINGS.fullmatch(key) and is_config(value) and value.get(_OMNI_STAGE) is None:
                    yield config_server(value, release)
            pending += reversed(
                [(value, replace(scope, keys=f"{scope.keys} {key.lower()}", key=key)) for key, value in node.items()]
            )
        elif node.scalar is None:
            pending += reversed([(item, scope) for item in node.list()])
        elif FENCE in node.scalar:
            continue  # a document, which is read as an embedded file
        elif (
            START.search(node.scalar)
            or node.scalar.lstrip().startswith("#!/bin/")
            or (scope.keys.endswith(_SCRIPTS) and _ABOUT_VLLM.search(node.scalar))
        ):
            subjects = read_shell(node.inner(), env=env_with_places(scope.env, node.source.place)).subjects
            image = scope.image if "vllm" in scope.image.lower() else ""
            for subject in subjects:
                if isinstance(subject, StartedServer) and not subject.image:
                    subject = scope.given_to(replace(subject, image=image))  # noqa: PLW2901
                yield subject


def custom_resource_servers(document: Node, release: Release) -> Iterator[StartedServer]:
    """The servers of a custom resource that has a Hub id as its model and flags of vLLM; none for others."""
    spec = document.get("spec")
    models = [spec.get("model", key) for key in ("name", "id", "uri", "repository")] if spec is not None else []
    model = next((node for node in models if node is not None and is_hub_id(node.scalar or "")), None)
    if spec is None or model is None:
        return
    pod = next((node for node in document.walk() if node.get("nodeSelector") is not None), spec)
    for server in other_subjects(document, release):
        if isinstance(server, StartedServer) and server.words and not resources.has_model_flag(server.words):
            yield replace(
                server,
                words=(*server.words[:2], model.word(), *server.words[2:]),
                gpus=gpu_limit(spec),
                gpu_names=possible_gpus(spec, pod, document.get("metadata")),
                memory_limit_bytes=kubernetes_bytes(spec.text("resources", "limits", "memory")),
                launcher=f"the controller of {document.text('kind')}",
                read_as=f"Kubernetes {document.text('kind')} {document.text('metadata', 'name')}".rstrip(),
            )


def _ray_llm_server(node: Node, release: Release) -> StartedServer:
    """The server of one entry of `llm_configs` of Ray Serve LLM."""
    model = node.get("model_loading_config", "model_source") or node.get("model_loading_config", "model_id") or node
    engine = config_server(node.get("engine_kwargs") or node, release)
    flags = engine.words[2:] if node.get("engine_kwargs") is not None else ()
    return replace(engine, words=(*engine.words[:2], model.word(), *flags), gpu_names=_named_card(node))


def _named_card(node: Node) -> tuple[str, ...]:
    """The known GPUs that keys of the mapping such as `gpu_type` name; empty without one."""
    return tuple(node.text(key) for key in _CARD_KEYS if is_known_gpu(node.text(key)))


def embedded_files(document: Node, scripts: bool) -> Iterator[tuple[Kind, Text]]:
    """(kind, text) of multi-line values about vLLM, as in a ConfigMap or playbook; shell only if `scripts` is true."""
    for node in document.walk():
        for key, value in node.items():
            text = value.scalar or ""
            if "\n" not in text or key in _COMMANDS or not _ABOUT_VLLM.search(text):
                continue
            kind = "document" if FENCE in text else kind_of(key, text) if "." in key else kind_by_first_line(text)
            if kind is None and _LOOKS_LIKE_YAML.match(text):
                kind = "yaml"
            if kind is not None and (scripts or kind != "shell"):
                yield kind, value.inner()


def _image_name(node: Node) -> str:
    """The image with its tag, `$tag` where only the chart knows it; empty where there is no image."""
    name, tag = node.text("image") or node.text("container"), node.text("tag")
    inner = node.get("image")
    if not name and inner is not None:
        return _image_name(inner)
    # Without a tag the chart sets it, usually to its own version.
    return name or (f"{node.text('repository')}:{tag or '$tag'}" if node.text("repository") else "")


def _server_of_arguments(node: Node, scope: _Scope) -> Iterator[StartedServer]:
    """The server of `command` and `args`, or of flags that are clearly vLLM's."""
    command = compose_words(node.get("command"))
    given = tuple(
        _whole_json(word)
        for key, value in node.items()
        if _ARGUMENTS.fullmatch(key)
        for word in (*compose_words(value), *_flag_keys(value))
        if word.text
    )
    words = (*command, *given)
    if scope.keys.startswith(_RECIPE):
        words = tuple(part for word in words for part in _flag_and_value(word))
    at, launcher = server_start(tuple(word.text for word in words)), ""
    if at is not None and basename(words[at].text) in CONTAINER_TOOLS:
        return  # it is read as a script
    if at is None:
        are_flags = bool(words) and words[0].text.startswith("--")
        keys = " ".join(key for key, _ in node.items() if _ARGUMENTS.fullmatch(key))
        around = f"{scope.keys} {keys} {scope.image} {node.text('modelCommand')}".lower()
        is_vllms = "vllm" in around.replace("vllm-project/", "")
        is_vllms = is_vllms and not _COMPANIONS.search(f"{around} {node.text('name')}")
        if not are_flags or not is_vllms or flag_names(words).isdisjoint(all_flag_names()):
            return
        is_titled = not resources.has_model_flag(words) and find(scope.key) is not None  # `Qwen3-8B: {vllm_args: ...}`
        title, launcher = ((Word(scope.key, node.offset, scope.key),), f"what reads {keys}") if is_titled else ((), "")
        words, at = (*serve_words(words[0].offset), *title, *words), 0
    place = node.source.place
    server = StartedServer("kubernetes", words[at:], scope.env, place, place(words[at].offset), scope.image)
    server = replace(server, gpu_names=_named_card(node), launcher=launcher)
    yield scope.given_to(server)


def _flag_keys(node: Node) -> Iterator[Word]:
    """Two words for each key like `--max-model-len: 4096`, the second empty for `true`; none for `false`."""
    for key, value in node.items():
        if key.startswith("--") and value.scalar is not None and value.scalar != "false":
            yield Word(key, value.offset, key)
            yield Word("" if value.scalar == "true" else value.scalar, value.offset, value.scalar)


def _whole_json(word: Word) -> Word:
    """A word such as `{"level": 3}` with the quotes of the file, which a shell would remove; others unchanged."""
    try:
        return word.with_text(word.raw) if word.raw.startswith("{") and json.loads(word.raw) else word
    except ValueError:
        return word


def _flag_and_value(word: Word) -> tuple[Word, ...]:
    """`--max-model-len auto`, a single list item, as two words; any other word as it is."""
    flag, space, value = word.text.partition(" ")
    if not space or not flag.startswith("--"):
        return (word,)
    return word.with_text(flag), word.with_text(value.strip())
