"""The JSON Schemas of requests and answers, from `facts/data/page_schemas.json`; requests are checked against them."""

from collections.abc import Callable
from functools import cache
from typing import Any

from legroom.facts import read_data

_REQUESTS = dict.fromkeys(("math", "speed"), "PlanRequest")
_REQUESTS |= dict.fromkeys(("models", "gpus", "releases"), "EmptyRequest")
"""Endpoints whose request schema is not named after them."""
_MAX_DEPTH = 60
_LIMITS = {"minimum": "{:,} or more", "maximum": "{:,} at most", "exclusiveMinimum": "more than {:,}"}
_LIMITS |= {"minLength": "{:,} characters or more", "maxLength": "{:,} characters at most"}
_LIMITS |= {"minItems": "{:,} entries or more", "maxItems": "{:,} entries at most"}
"""How a limit of a schema reads."""


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
    """What in the request violates the endpoint's schema, as a sentence; empty for nothing, or without jsonschema."""
    if _depth(request) > _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    if (error := _violation_finder(endpoint)(request)) is None:
        return ""
    where, limit = error.json_path.removeprefix("$").removeprefix("."), error.validator_value
    if rule := _LIMITS.get(error.validator):
        return f"{where} takes {rule.format(limit)}"
    if error.validator == "type":
        return f"{where or 'it'} takes {' or '.join([limit] if isinstance(limit, str) else limit)}"
    return f"{where}: {error.message}".removeprefix(": ")


@cache
def _violation_finder(endpoint: str) -> Callable[[Any], Any]:
    """A function: request -> its most telling schema violation or None; always None without jsonschema."""
    try:
        import jsonschema
    except ImportError:  # in the browser, where only the page itself sends requests
        return lambda request: None
    schema = {"$ref": f"#/components/schemas/{request_name(endpoint)}", "components": {"schemas": schemas()}}
    validator = jsonschema.Draft202012Validator(schema)
    return lambda request: jsonschema.exceptions.best_match(validator.iter_errors(request))


def with_whole_numbers(request: dict[str, Any]) -> dict[str, Any]:
    """The request, its `mix` and `plan` with 2.0 as 2, which JSON Schema counts as an integer; no deeper values."""
    inner = {name: with_whole_numbers(request[name]) for name in ("mix", "plan") if isinstance(request.get(name), dict)}
    whole = {name: int(value) for name, value in request.items() if isinstance(value, float) and value.is_integer()}
    return {**request, **whole, **inner}


def _depth(value: Any) -> int:
    """How deeply a JSON value is nested, counted without recursion, which a deep one would exhaust."""
    depth, level = 0, [value]
    while depth <= _MAX_DEPTH + 1 and (level := [each for each in level if isinstance(each, (dict, list))]):
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth
