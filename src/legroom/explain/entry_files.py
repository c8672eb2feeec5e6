"""The catalog's files as they stand: entries and schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "catalog"


def bundled_documents() -> dict[str, Any]:
    paths = sorted((_FOLDER / "entries").glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def entry_schema() -> Mapping[str, Any]:
    return _schema("schema.json")


def record_schema() -> Mapping[str, Any]:
    """The JSON Schema of an exported record."""
    return _schema("record.schema.json")


@cache
def _schema(name: str) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = json.loads((_FOLDER / name).read_text(encoding="utf-8"))
    return schema
