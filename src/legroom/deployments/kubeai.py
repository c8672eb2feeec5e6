"""KubeAI's Models: an object of Kubernetes, or an entry of its chart's catalog, that says what vLLM is given."""

from __future__ import annotations

import re

from legroom.deployments.server_words import expand
from legroom.deployments.shell.scan import Word
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node

_PROFILE = re.compile(r"(?P<name>[\w.-]+):(?P<count>\d{1,4})")
"""`nvidia-gpu-h100:8`: a resource profile, and how many times it is taken."""
_GPU_PROFILE = re.compile(r"(?:nvidia|amd)-gpu-(?P<gpu>[\w.-]+)")


def is_kubeai_model(node: Node) -> bool:
    """Whether a mapping has what KubeAI needs to start vLLM."""
    return node.text("engine").lower() == "vllm" and (
        node.get("resourceProfile") is not None or "://" in node.text("url")
    )


def kubeai_server(node: Node) -> StartedServer:
    """The server that KubeAI's controller starts: `--model` comes from `url`, the rest from `args`."""
    variables = node.get("env")
    env = {name: value.word() for name, value in variables.items() if value.scalar is not None} if variables else {}
    values = {name: word.text for name, word in env.items()}
    given = node.get("args")
    words = tuple(
        item.word().with_text(expand(item.scalar, values))
        for item in (given.list() if given else ())
        if item.scalar is not None
    )
    place = node.source.place
    profile = _PROFILE.fullmatch(node.text("resourceProfile"))
    # Profiles of other hardware bring an image of their own, of a release that is not said.
    card = _GPU_PROFILE.fullmatch(profile["name"]) if profile else None
    return StartedServer(
        "kubernetes",
        (Word("vllm", node.offset), Word("serve", node.offset), *_model(node), *words),
        env,
        place,
        place(node.offset),
        image=node.text("image") or ("" if card or profile is None else profile["name"]),
        in_container=True,
        # KubeAI mounts a /dev/shm of its own into every pod of a model.
        shm="mounted",
        gpus=int(profile["count"]) if profile and card else None,
        gpu_name=card["gpu"] if card else "",
        read_as="a KubeAI model",
    )


def _model(node: Node) -> tuple[Word, ...]:
    url = node.get("url")
    scheme, _, name = (url.scalar or "").partition("://") if url is not None else ("", "", "")
    name = name.partition("?")[0]
    return (Word(f"--model={name}", url.offset),) if url is not None and scheme == "hf" and name else ()
