"""Checking the whole catalog: every file against the schema, and what a schema cannot say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.explain.entry_files import bundled_documents, entry_schema
from legroom.explain.schema_check import problems
from legroom.facts.evidence import message_patterns


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
        import re2  # noqa: PLC0415
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
            yield from (f"the example names no figure {figure!r}" for figure in example["figures"]
                        if "{" + figure + "}" not in text)  # fmt: skip


def _signature_problems(document: Mapping[str, Any]) -> Iterator[str]:
    re2 = _re2()
    known = {message.id for message in message_patterns()}
    for signature in document["signatures"]:
        problem = pattern_problem(signature["pattern"])
        if problem:
            yield f"the pattern {signature['pattern']!r} is not RE2: {problem}"
        elif not re2.search(signature["pattern"], signature["example"]):
            yield f"the pattern {signature['pattern']!r} does not match its own example"
        yield from (f"there is no message {name!r}" for name in signature["messages"] if name not in known)
