"""The catalog's files: entries and schemas as they stand, and what is wrong with them.

Documents are checked against the keywords of JSON Schema that the catalog's schemas use. The full validator is a
development dependency only: the tests hold this one to its verdicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError

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


def catalog_problems(documents: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with the entry files, each with its file; empty where all is well."""
    documents = bundled_documents() if documents is None else documents
    faults: list[str] = []
    sound: dict[str, Mapping[str, Any]] = {}
    for name, document in documents.items():
        wrong = problems(document, entry_schema())
        faults += [f"{name}: {problem}" for problem in wrong]
        if not wrong:
            sound[name] = document
    ids = {document["id"] for document in sound.values()}
    for name, document in sound.items():
        faults += [f"{name}: {problem}" for problem in _beyond_the_schema(name, document, ids)]
    return faults


def pattern_problem(pattern: str) -> str | None:
    """Why RE2, which matches in linear time, does not take a pattern; None where it does."""
    re2 = _re2()
    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        return str(error)
    return None


def _re2() -> Any:
    try:
        import re2
    except ImportError:
        message = "checking patterns needs the package google-re2"
        raise LegroomError(message, "pip install 'legroom[scan]'", UNREACHABLE) from None
    return re2


def _beyond_the_schema(name: str, document: Mapping[str, Any], ids: set[str]) -> Iterator[str]:
    if name != f"{document['id']}.json":
        yield f"holds the entry {document['id']}"
    for kind, others in document["transitions"].items():
        yield from (f"{kind} names {other}, which is not in the catalog" for other in others if other not in ids)
        if document["id"] in others:
            yield f"{kind} names itself"
    yield from _signature_problems(document)
    example = document["example"]
    if example:
        for text in example["text"].values():
            yield from (
                f"the example names no figure {figure!r}"
                for figure in example["figures"]
                if "{" + figure + "}" not in text
            )


def _signature_problems(document: Mapping[str, Any]) -> Iterator[str]:
    from legroom.facts.log_messages import message_patterns  # reading the catalog does without

    re2 = _re2()
    known = {message.id for message in message_patterns()}
    for signature in document["signatures"]:
        problem = pattern_problem(signature["pattern"])
        if problem:
            yield f"the pattern {signature['pattern']!r} is not RE2: {problem}"
        elif not re2.search(signature["pattern"], signature["example"]):
            yield f"the pattern {signature['pattern']!r} does not match its own example"
        yield from (f"there is no message {name!r}" for name in signature["messages"] if name not in known)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
KEYWORDS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "pattern",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "uniqueItems",
        "$ref",
        "$defs",
        "$schema",
        "$id",
        "title",
        "description",
        "anyOf",
    }
)


def problems(document: Any, schema: Mapping[str, Any]) -> list[str]:
    """What a schema says is wrong with a document, each with where; empty where all is well."""
    return list(_check(document, schema, schema, "$"))


def _check(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> Iterator[str]:
    if "$ref" in schema:
        yield from _check(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema and not any(not list(_check(value, choice, root, at)) for choice in schema["anyOf"]):
        yield f"{at}: fits none of the forms it may have"
    if "type" in schema and not _is(value, schema["type"]):
        wanted = schema["type"] if isinstance(schema["type"], str) else " or ".join(schema["type"])
        yield f"{at}: is {_name(value)}, not {wanted}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is not one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, str):
        yield from _check_string(value, schema, at)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _check_number(value, schema, at)
    elif isinstance(value, list):
        yield from _check_list(value, schema, root, at)
    elif isinstance(value, dict):
        yield from _check_object(value, schema, root, at)


def _check_string(value: str, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if len(value) < schema.get("minLength", 0):
        yield f"{at}: is empty"
    if len(value) > schema.get("maxLength", len(value)):
        yield f"{at}: has {len(value):,} characters, may have {schema['maxLength']:,}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: {value!r} does not look like {schema['pattern']}"


def _check_number(value: float, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        yield f"{at}: {value} is out of range"


def _check_list(value: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{at}: has {len(value)} items, needs {schema['minItems']}"
    if len(value) > schema.get("maxItems", len(value)):
        yield f"{at}: has {len(value)} items, may have {schema['maxItems']}"
    if schema.get("uniqueItems") and any(item in value[:place] for place, item in enumerate(value)):
        yield f"{at}: has an item twice"
    for place, item in enumerate(value):
        yield from _check(item, schema.get("items", {}), root, f"{at}[{place}]")


def _check_object(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> Iterator[str]:
    known = schema.get("properties", {})
    yield from (f"{at}: has no {name!r}" for name in schema.get("required", ()) if name not in value)
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in known:
            yield from _check(item, known[name], root, f"{at}.{name}")
        elif others is False:
            yield f"{at}: {name!r} does not belong there"
        elif isinstance(others, dict):
            yield from _check(item, others, root, f"{at}.{name}")


def _is(value: Any, wanted: str | list[str]) -> bool:
    return any(_is_one(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted))


def _is_one(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()  # the specification counts 1.0 as an integer
    return isinstance(value, _TYPES[name])


def _name(value: Any) -> str:
    return next((name for name in _TYPES if _is(value, name)), type(value).__name__)
