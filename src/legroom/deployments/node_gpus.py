"""The GPU models that a pod may run on, by its node selector, affinity and limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from legroom.deployments.yaml_nodes import Node
from legroom.facts.node_labels import gpu_of_labels, gpu_of_resource, naming_labels

GPU_ANNOTATION = "legroom/gpu"
"""An annotation that names the GPU, where no node label does."""
_REQUIRED = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
_PROFILE = re.compile(r".*\bmig (.+)")


def possible_gpus(container: Node, pod: Node, *metadata: Node | None) -> tuple[str, ...]:
    """The GPUs that a pod may run on, as `--gpu` accepts them; empty where nothing names one."""
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
    return tuple(name for name in whole if _is_gpu(name)) or (part,)


def _slice(container: Node) -> str:
    for side in ("limits", "requests"):
        amounts = container.get("resources", side)
        for name, _ in amounts.items() if amounts else ():
            if part := gpu_of_resource(name):
                return part
    return ""


def _is_gpu(name: str) -> bool:
    return bool(gpu_of_labels({"nvidia.com/gpu.product": name}))


def _label_sets(pod: Node) -> Iterator[dict[str, str]]:
    """The label sets of the nodes that the pod accepts."""
    selector = pod.get("nodeSelector")
    fixed = {key: value.scalar or "" for key, value in selector.items()} if selector else {}
    terms = pod.get(*_REQUIRED)
    choices = [_choices(term) for term in terms.list()] if terms is not None else []
    for chosen in choices or [{}]:
        names, values = list(chosen), [chosen[name] for name in chosen]
        for combination in islice(product(*values), 32):
            yield fixed | dict(zip(names, combination, strict=True))


def _choices(term: Node) -> dict[str, list[str]]:
    """The values of GPU labels that a node selector term requires with `In`."""
    wanted = naming_labels()
    expressions = term.get("matchExpressions")
    chosen: dict[str, list[str]] = {}
    for expression in expressions.list() if expressions is not None else ():
        key, values = expression.text("key"), expression.get("values")
        if key in wanted and expression.text("operator") == "In" and values is not None:
            chosen[key] = [value.scalar or "" for value in values.list()]
    return chosen
