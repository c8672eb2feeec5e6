"""Checks objects of a cluster strictly: built-in kinds by Kubernetes' own schema, others by an outline of theirs in
`tests/fixtures/crds`, and by the published files where LEGROOM_CRDS names a folder that has them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

OUTLINES = Path(__file__).parents[1] / "fixtures/crds"
VERSION = "1.32"


@cache
def outlines() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in OUTLINES.glob("*.json")}


@cache
def published() -> dict[tuple[str, str], Any]:
    """By kind and apiVersion, as strict as the API server with `fieldValidation=Strict`."""
    folder = os.environ.get("LEGROOM_CRDS")
    by_kind: dict[tuple[str, str], Any] = {}
    for path in Path(folder).glob("*.yaml") if folder else ():
        for document in yaml.load_all(path.read_text("utf-8"), yaml.CSafeLoader):
            spec = document["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                by_kind[spec["names"]["kind"], f"{spec['group']}/{version['name']}"] = schema
    return by_kind


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key not in ("format", "pattern")}
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    open_ = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_:
        made["additionalProperties"] = False
        if "metadata" in schema["properties"] and schema["properties"]["metadata"] == {"type": "object"}:
            made["properties"]["metadata"] = {"type": "object"}
    return made


@cache
def kubernetes_schema() -> Callable[[dict[str, Any]], object]:
    """kubernetes-validate reads a megabyte of definitions for every document; here they are read once."""
    utils = pytest.importorskip("kubernetes_validate.utils")
    utils.schema_contents, utils.all_versions = cache(utils.schema_contents), cache(utils.all_versions)
    return lambda document: utils.validate(document, VERSION, strict=True)


def check(document: dict[str, Any]) -> None:
    """Raises where a field is unknown, missing or of another type."""
    validate = kubernetes_schema()
    kind = document["kind"]
    outline = outlines().get(kind)
    if outline is None:
        validate(document)
        return
    assert document["apiVersion"] == outline["apiVersion"]
    pods: list[Any] = []
    _by_outline(document["spec"], outline["spec"], f"{kind}.spec", pods)
    for pod in pods:
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}, "spec": pod["spec"]}
        validate(whole)
    full = published().get((kind, document["apiVersion"]))
    if full is not None:
        jsonschema.Draft7Validator(full).validate(document)


def _by_outline(value: Any, outline: Any, place: str, pods: list[Any]) -> None:
    if outline == "pod":
        pods.append(value)
    elif isinstance(outline, list):
        assert isinstance(value, list), place
        for number, inner in enumerate(value):
            _by_outline(inner, outline[0], f"{place}[{number}]", pods)
    elif isinstance(outline, dict):
        if "one of" in outline:
            assert value in outline["one of"], f"{place}: {value!r}"
            return
        assert isinstance(value, dict), place
        if "each" in outline:
            assert all(isinstance(inner, str) for inner in value.values()), place
            return
        for name, inner in value.items():
            assert name in outline, f"{place} has no {name}"
            _by_outline(inner, outline[name], f"{place}.{name}", pods)
    else:
        types = {"int": int, "text": str, "bool": bool, "any": object}
        assert isinstance(value, types[outline]), f"{place}: {value!r} is not {outline}"
