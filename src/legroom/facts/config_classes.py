"""Fields of vLLM's config classes, interfaces of its model classes, names it knows. Data: `tools/import_vllm.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from legroom.facts import DATA_FOLDER, read_data
from legroom.facts.releases import Release


@cache
def _asked_releases() -> tuple[str, ...]:
    """The releases whose code was asked, the oldest first."""
    names = (path.stem for path in DATA_FOLDER.joinpath("vllm").glob("*.json"))
    return tuple(sorted(names, key=lambda name: [int(number) for number in name.split(".")]))


@cache
def release_facts(part: str, release: Release) -> Mapping[str, Any]:
    """One part of the answers of the newest asked release up to this one; empty where none was asked."""
    name = next((name for name in reversed(_asked_releases()) if not release.before(name)), None)
    facts: Mapping[str, Any] = read_data(f"vllm/{name}.json").get(part, {}) if name else {}
    return facts


def is_asked(release: Release) -> bool:
    """Whether the code of this release, or of one before it, was asked."""
    return bool(release_facts("config_fields", release))


def config_class(name: str, release: Release) -> Mapping[str, Any]:
    """Bounds (ge, gt, le, lt) and choices of a class's fields; empty for a release whose code was not asked."""
    fields: Mapping[str, Any] = release_facts("config_fields", release).get(name, {})
    return fields


@cache
def field_of_flag(dest: str, release: Release) -> Mapping[str, Any]:
    """The rule of the config field that a flag sets; empty where no class has one."""
    classes = release_facts("config_fields", release)
    found = (fields[dest] for name, fields in classes.items() if name != "names" and dest in fields)
    return next(found, {})


@cache
def known_names(kind: str, release: Release) -> tuple[str, ...]:
    """Names of one kind (connectors, attention_backends ...); empty where the release was not asked."""
    return tuple(release_facts("config_fields", release).get("names", {}).get(kind, ()))


@cache
def interfaces(architecture: str, release: Release) -> frozenset[str] | None:
    """What a model class implements (pipeline_parallel, lora, mtp, ...); None where it is not known."""
    words = release_facts("model_interfaces", release).get(architecture)
    return None if words is None else frozenset(words.split())


def accepted_quantizations(kind: str, release: Release) -> tuple[str, ...] | None:
    """Values of --quantization that a kind of checkpoint accepts, () for every value; None where not known."""
    row = release_facts("quantization_overrides", release).get(kind)
    return None if row is None else () if row["every_flag"] else tuple(row["flags"])
