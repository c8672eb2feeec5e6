"""Which GPUs a pod may run on, as its node selector, its affinity and its limits say it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from legroom.deployments.yaml_nodes import Node
from legroom.facts.node_labels import gpu_of_labels, gpu_of_resource, naming_labels

GPU_ANNOTATION = "legroom/gpu"
"""On an object or its pods: the GPU, where no label of a node names it."""
_REQUIRED = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
_MOST_COMBINED = 32
"""Combinations of values that are looked at; a pod that allows more says nothing of its GPU."""
_PROFILE = re.compile(r".*\bmig (.+)")


def gpus_named(container: Node, pod: Node, *metadata: Node | None) -> tuple[str, ...]:
    """The GPUs that may be chosen for a pod, as `--gpu` takes them; empty where nothing names one."""
    for described in metadata:
        written = described.text("annotations", GPU_ANNOTATION) if described is not None else ""
        if written:
            return tuple(name.strip() for name in written.split(",") if name.strip())
    named = tuple(dict.fromkeys(filter(None, map(gpu_of_labels, _label_sets(pod)))))
    part = _slice(container)
    if not part:
        return named
    profile = _PROFILE.match(part)
    whole = [f"{name} mig {profile[1]}" for name in named if profile and " mig " not in name.lower()]
    return tuple(name for name in whole if _is_a_card(name)) or (part,)


def _slice(container: Node) -> str:
    for side in ("limits", "requests"):
        amounts = container.get("resources", side)
        for name, _ in amounts.items() if amounts else ():
            if part := gpu_of_resource(name):
                return part
    return ""


def _is_a_card(name: str) -> bool:
    return bool(gpu_of_labels({"nvidia.com/gpu.product": name}))


def _label_sets(pod: Node) -> Iterator[dict[str, str]]:
    """The labels of a node that the pod could be put on, one set for each way to choose them."""
    selector = pod.get("nodeSelector")
    fixed = {key: value.scalar or "" for key, value in selector.items()} if selector else {}
    terms = pod.get(*_REQUIRED)
    choices = [_choices(term) for term in terms.list()] if terms is not None else []
    for chosen in choices or [{}]:
        names, values = list(chosen), [chosen[name] for name in chosen]
        for combination in islice(product(*values), _MOST_COMBINED):
            yield fixed | dict(zip(names, combination, strict=True))


def _choices(term: Node) -> dict[str, list[str]]:
    """Label -> values of one term that speak of a GPU: those that must be `In` a list."""
    wanted = naming_labels()
    expressions = term.get("matchExpressions")
    chosen: dict[str, list[str]] = {}
    for expression in expressions.list() if expressions is not None else ():
        key, values = expression.text("key"), expression.get("values")
        if key in wanted and expression.text("operator") == "In" and values is not None:
            chosen[key] = [value.scalar or "" for value in values.list()]
    return chosen
