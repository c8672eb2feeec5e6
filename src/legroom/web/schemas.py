"""What every endpoint takes and gives, as JSON Schema. Data in `schemas.json`.

Requests are checked against what the OpenAPI document publishes, so the two cannot disagree.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

REQUESTS = {
    "plan": "PlanRequest",
    "math": "PlanRequest",
    "size": "SizeRequest",
    "read": "ReadRequest",
    "lint": "LintRequest",
    "fragments": "FragmentsRequest",
    "diagnose": "DiagnoseRequest",
    "simulate": "SimulateRequest",
    "models": "EmptyRequest",
    "gpus": "EmptyRequest",
    "releases": "EmptyRequest",
    "flags": "FlagsRequest",
    "catalog": "CatalogRequest",
    "entry": "EntryRequest",
    "hub": "HubRequest",
}
_DEEPEST = 60


def response_name(endpoint: str) -> str:
    """The schema of an endpoint's answer: `PlanDocument`."""
    return f"{endpoint.capitalize()}Document"


@cache
def schemas() -> dict[str, Any]:
    """Every schema by its name."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
    return document


def check_request(endpoint: str, request: Any) -> str:
    """What is wrong with a request in a few words; empty where it has the endpoint's form."""
    if _depth(request) > _DEEPEST:
        return f"it is nested more than {_DEEPEST} deep"
    validator = _validator(endpoint)
    error = next(validator.iter_errors(request), None) if validator else None
    return f"{error.json_path.removeprefix('$.')}: {error.message}".removeprefix("$: ") if error else ""


@cache
def _validator(endpoint: str) -> Any:
    try:
        import jsonschema
    except ImportError:  # in the browser, where only the page itself sends requests
        return None
    schema = {"$ref": f"#/components/schemas/{REQUESTS[endpoint]}", "components": {"schemas": schemas()}}
    return jsonschema.Draft202012Validator(schema)


def with_whole_numbers(request: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema counts 2.0 as an integer, and so must what is called with it. Flags and configs stay as they are."""
    inner = {name: with_whole_numbers(request[name]) for name in ("mix", "plan") if isinstance(request.get(name), dict)}
    whole = {name: int(value) for name, value in request.items() if isinstance(value, float) and value.is_integer()}
    return {**request, **whole, **inner}


def _depth(value: Any) -> int:
    """Levels of nesting, level by level: a deep document must not exhaust the stack of whoever reads it."""
    depth, level = 0, [value]
    while level and depth <= _DEEPEST + 1:
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        depth, level = depth + 1, [item for item in inner if isinstance(item, (dict, list))]
    return depth
