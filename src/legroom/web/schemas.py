"""The JSON Schemas of requests and answers, from `facts/data/page_schemas.json`; requests are checked against them."""

from functools import cache
from typing import Any

from legroom.facts import read_data

_REQUESTS = dict.fromkeys(("math", "speed"), "PlanRequest")
_REQUESTS |= dict.fromkeys(("models", "gpus", "releases"), "EmptyRequest")
"""Endpoints whose request schema is not named after them."""
_MAX_DEPTH = 60


def request_name(endpoint: str) -> str:
    """The name of the schema of an endpoint's request, such as `PlanRequest`."""
    return _REQUESTS.get(endpoint, f"{endpoint.capitalize()}Request")


def response_name(endpoint: str) -> str:
    """The name of the schema of an endpoint's answer, such as `PlanDocument`."""
    return f"{endpoint.capitalize()}Document"


@cache
def schemas() -> dict[str, Any]:
    """Name -> JSON Schema of every request and answer."""
    return read_data("page_schemas.json")  # type: ignore[no-any-return]


def check_request(endpoint: str, request: Any) -> str:
    """The first violation of the endpoint's schema as text; empty where there is none, or no jsonschema to find it."""
    if _depth(request) > _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    validator = _schema_validator(endpoint)
    error = next(validator.iter_errors(request), None) if validator else None
    return f"{error.json_path.removeprefix('$.')}: {error.message}".removeprefix("$: ") if error else ""


@cache
def _schema_validator(endpoint: str) -> Any:
    """The jsonschema validator of the endpoint's requests; None in the browser, which lacks jsonschema."""
    try:
        import jsonschema
    except ImportError:  # in the browser, where only the page itself sends requests
        return None
    schema = {"$ref": f"#/components/schemas/{request_name(endpoint)}", "components": {"schemas": schemas()}}
    return jsonschema.Draft202012Validator(schema)


def with_whole_numbers(request: dict[str, Any]) -> dict[str, Any]:
    """The request with 2.0 as 2, which JSON Schema counts as an integer too. Flags and configs are left alone."""
    inner = {name: with_whole_numbers(request[name]) for name in ("mix", "plan") if isinstance(request.get(name), dict)}
    whole = {name: int(value) for name, value in request.items() if isinstance(value, float) and value.is_integer()}
    return {**request, **whole, **inner}


def _depth(value: Any) -> int:
    """How deeply a JSON value is nested, counted without recursion, which a deep one would exhaust."""
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH + 1:
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        depth, level = depth + 1, [item for item in inner if isinstance(item, (dict, list))]
    return depth
