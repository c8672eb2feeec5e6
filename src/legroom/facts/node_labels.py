"""The GPU that the labels of a Kubernetes node name. Data in `data/node_labels.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.gpus import gpu

GPU_ANNOTATION = "legroom/gpu"
"""An annotation that names the GPU, where no node label does."""
_MIG_RESOURCE = re.compile(r"nvidia\.com/mig-(\d+g\.\d+gb)(?:\.me)?")


def gpu_of_labels(labels: Mapping[str, str]) -> str:
    """The GPU that a set of labels names, as `--gpu` takes it; empty where none does."""
    data = read_data("node_labels.json")
    profile = next((labels[row["label"]] for row in data["mig_profile"] if labels.get(row["label"])), "")
    for row in data["product"]:
        if name := _gpu_of_product(labels.get(row["label"], ""), profile):
            return name
    for row in data["instance_type"]:
        if name := _gpu_of_instance_type(labels.get(row["label"], "")):
            return name
    for row in data["memory_mib"]:
        if (text := labels.get(row["label"], "")).isdecimal():
            return f"{int(text[:9])}MiB"
    return ""


def gpu_of_resource(resource: str) -> str:
    """The MIG slice of a resource such as `nvidia.com/mig-3g.40gb`; empty for a whole card. Of two cards with a slice
    of that name, the smaller one is returned."""
    profile = _MIG_RESOURCE.fullmatch(resource)
    return read_data("node_labels.json")["mig_resource_cards"].get(profile[1], "") if profile else ""


def gpu_of_profile(profile: str) -> str:
    """The card of a resource profile such as KubeAI's `nvidia-gpu-l4`; empty for an unknown profile."""
    for row in read_data("node_labels.json")["profile_prefixes"]:
        if profile.startswith(row["prefix"]):
            return _gpu_of_product(profile.removeprefix(row["prefix"]), "")
    return ""


def naming_labels() -> tuple[str, ...]:
    """Every label that can name a GPU, the most specific first."""
    data = read_data("node_labels.json")
    kinds = ("product", "instance_type", "memory_mib", "mig_profile")
    return tuple(row["label"] for kind in kinds for row in data[kind])


def _gpu_of_product(value: str, profile: str) -> str:
    """The GPU that a product label's value names, with its MIG profile where given; empty where unknown."""
    if not value:
        return ""
    known = read_data("node_labels.json")["products"].get(value, "")
    dropped = read_data("node_labels.json")["name_words_dropped"]
    words = [word for word in re.split(r"[-_ ]", value) if word.lower() not in dropped]
    for name in (known, value, "-".join(words)):
        if name and _is_known_gpu(whole := f"{name} mig {profile}" if profile else name):
            return whole
    return ""


def _gpu_of_instance_type(value: str) -> str:
    """The GPU of a cloud's instance type; empty where unknown."""
    name = value.lower()
    for row in read_data("node_labels.json")["instances"] if name else ():
        if re.fullmatch(row["pattern"], name):
            return str(row["gpu"])
    return ""


@cache
def _is_known_gpu(name: str) -> bool:
    try:
        gpu(name)
    except LegroomError:
        return False
    return True
