"""Fields of vLLM's config classes, interfaces of its model classes, names it knows. Data: `tools/import_vllm.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.releases import Release


def _table(file: str, release: Release) -> Mapping[str, Any]:
    """The answers of the newest release up to this one; empty where none was asked."""
    tables = read_data(file)["releases"]
    name = next((name for name in reversed(tables) if not release.before(name)), None)
    return tables[name] if name else {}


def config_class(name: str, release: Release) -> Mapping[str, Any]:
    """Bounds (ge, gt, le, lt) and choices of a class's fields; empty for a release whose code was not asked."""
    return dict(_table("config_fields.json", release).get(name, {}))


@cache
def field_of_flag(dest: str, release: Release) -> Mapping[str, Any]:
    """The rule of the config field that a flag sets; empty where no class has one."""
    classes = _table("config_fields.json", release)
    found = (fields[dest] for name, fields in classes.items() if name != "names" and dest in fields)
    return next(found, {})


def known_names(kind: str, release: Release) -> tuple[str, ...]:
    """connectors, attention_backends, or model types without_float16; empty where the release was not asked."""
    return tuple(_table("config_fields.json", release).get("names", {}).get(kind, ()))


def interfaces(architecture: str, release: Release) -> frozenset[str] | None:
    """What a model class implements (pipeline_parallel, lora, mtp, ...); None where it is not known."""
    words = _table("model_interfaces.json", release).get(architecture)
    return None if words is None else frozenset(words.split())


def accepted_quantizations(kind: str, release: Release) -> tuple[str, ...] | None:
    """Values of --quantization that a kind of checkpoint accepts, () for every value; None where not known."""
    row = _table("quantization_overrides.json", release).get(kind)
    return None if row is None else () if row["every_flag"] else tuple(row["flags"])
