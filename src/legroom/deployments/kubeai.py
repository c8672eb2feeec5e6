"""KubeAI's Models: an object of Kubernetes, or an entry of its chart's catalog, that says what vLLM is given."""

from __future__ import annotations

import re

from legroom.deployments.server_words import expand
from legroom.deployments.shell.scan import Word
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.facts.node_labels import gpu_of_profile

_PROFILE = re.compile(r"(?P<name>[\w.-]+):(?P<count>\d{1,4})")
"""`nvidia-gpu-h100:8`: a resource profile, and how many times it is taken."""


def is_kubeai_model(node: Node) -> bool:
    """Whether a mapping has what KubeAI needs to start vLLM."""
    return node.text("engine").lower() == "vllm" and (
        node.get("resourceProfile") is not None or "://" in node.text("url")
    )


def kubeai_server(node: Node, read_as: str = "a KubeAI model", gpu: str = "") -> StartedServer:
    """The server that KubeAI's controller starts: the model comes from `url`, the rest from `args` and `adapters`."""
    variables = node.get("env")
    env = {name: value.word() for name, value in variables.items() if value.scalar is not None} if variables else {}
    profile = _PROFILE.fullmatch(node.text("resourceProfile"))
    # Profiles of other hardware bring an image of their own, of a release that is not said.
    card = gpu or (gpu_of_profile(profile["name"]) if profile else "")
    url = node.get("url")
    flags = _flags(node, env)
    words = serve_words(url) if url is not None else (Word("vllm", node.offset), Word("serve", node.offset))
    words = words[:2] if names_model(flags) else words
    place = node.source.place
    return StartedServer(
        "kubernetes",
        (*words, *flags),
        env,
        place,
        place(node.offset),
        image=node.text("image") or ("" if card or profile is None else profile["name"]),
        in_container=True,
        # KubeAI mounts a /dev/shm of its own into every pod of a model.
        shm="mounted",
        gpus=(profile and int(profile["count"])) or 1,
        gpu_names=(card,) if card else (),
        read_as=read_as,
    )


def _flags(node: Node, env: dict[str, Word]) -> tuple[Word, ...]:
    values = {name: word.text for name, word in env.items()}
    given, adapters = node.get("args"), node.get("adapters")
    words = [
        item.word().with_text(expand(item.scalar, values))
        for item in (given.list() if given else ())
        if item.scalar is not None
    ]
    if adapters is not None and adapters.list():
        words.append(Word("--enable-lora", adapters.offset))
    return tuple(words)


def names_model(words: tuple[Word, ...]) -> bool:
    """Whether flags name a model themselves: then the one of the resource is not served."""
    return any(word.text.partition("=")[0] == "--model" for word in words)


def serve_words(uri: Node) -> tuple[Word, ...]:
    """`hf://org/model` as the words of a server; a bucket or a volume stays what it is, which no config is known of."""
    text = uri.scalar or ""
    scheme, _, name = text.partition("://")
    model = name.partition("?")[0] if scheme == "hf" else text
    return Word("vllm", uri.offset), Word("serve", uri.offset), Word(model, uri.offset, model)
