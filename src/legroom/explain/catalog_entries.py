"""Reads and validates the catalog: legroom's own entries and the records that the user imported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from legroom.errors import LegroomError
from legroom.explain.entry import (
    CATALOG_FOLDER,
    Entry,
    EntryDeadEnd,
    Example,
    ExampleFigure,
    Localized,
    Signature,
    Story,
    Thread,
    Version,
    Workaround,
    document_problems,
)


def bundled_documents() -> dict[str, Any]:
    """Every entry file by its name."""
    paths = sorted((CATALOG_FOLDER / "entries").glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


@cache
def bundled() -> tuple[Entry, ...]:
    """legroom's own entries, by id."""
    return tuple(entry_of_document(document) for document in bundled_documents().values())


def entries() -> tuple[Entry, ...]:
    """legroom's own entries, then the imported ones."""
    from legroom.explain.deadends import imported_entries  # costs time that a diagnosis does not need

    return (*bundled(), *imported_entries())


def entry(name: str) -> Entry:
    """The entry with this id, in upper or lower case; the error for an unknown id names the nearest ones."""
    wanted = name.strip().lower()
    every = entries()
    for known in every:
        if known.id.lower() == wanted:
            return known
    raise LegroomError(f"the catalog has no entry {name!r}", _nearest_entries_hint(wanted, every))


def entries_of_label(label: str) -> tuple[Entry, ...]:
    """The entries of one cause label, the general one first."""
    every = entries()
    own = [known for known in every if known.label == label]
    return (*own, *(known for known in every if label in known.also))


def best_entry(label: str, message_ids: frozenset[str], default: str) -> Entry:
    """Of a label's entries, the one whose signatures contain most of these messages; `default` where none does."""
    candidates = entries_of_label(label)
    scored = [
        (
            len(message_ids & {name for signature in candidate.signatures for name in signature.messages}),
            candidate.id == default,
        )
        for candidate in candidates
    ]
    if not candidates or not any(hits for hits, _ in scored):
        return entry(default)
    return max(zip(scored, candidates, strict=True), key=lambda pair: pair[0])[1]


def entry_of_document(document: Mapping[str, Any]) -> Entry:
    """One entry file as an object."""
    transitions = document["transitions"]
    documentation = document["documentation"] or {"url": None, "section": None}
    return Entry(
        id=document["id"],
        label=document["label"],
        phase=document["phase"],
        title=_localized(document["title"]),
        signatures=tuple(
            Signature(_localized(item["text"]), item["pattern"], item["example"], tuple(item["messages"]))
            for item in document["signatures"]
        ),
        domain=document["domain"],
        category=document["category"],
        subcategory=document["subcategory"],
        cause_type=document["root_cause"]["type"],
        cause=_localized(document["root_cause"]),
        versions=tuple(Version(**item) for item in document["versions"]),
        os_specific=document["os_specific"],
        dead_ends=tuple(
            EntryDeadEnd(
                _localized(item["action"]),
                _localized(item["why_fails"]),
                _localized(item["condition"]),
                item["kind"],
                item["myth"],
            )
            for item in document["dead_ends"]
        ),
        workarounds=tuple(
            Workaround(_localized(item["action"]), _localized(item["how"]), _localized(item["condition"]), item["kind"])
            for item in document["workarounds"]
        ),
        leads_to=tuple(transitions["leads_to"]),
        preceded_by=tuple(transitions["preceded_by"]),
        confused_with=tuple(transitions["confused_with"]),
        documentation=documentation["url"],
        documentation_section=documentation["section"],
        error_code=document["error_code"],
        resolvable=document["resolvable"],
        threads=tuple(
            Thread(item["thread"], item["seen"], item["confirmed"], tuple(item["worked"]), tuple(item["failed"]))
            for item in document["evidence"]
        ),
        updated=document["updated"],
        tags=tuple(document["tags"]),
        aliases=tuple(document["aliases"]),
        also=tuple(document["also"]),
        story=_read_story(document["story"]),
        example=_read_example(document["example"]),
    )


def _localized(value: Mapping[str, str]) -> Localized:
    return Localized(value["en"], value["zh"])


def _read_story(document: Mapping[str, Any]) -> Story:
    return Story(
        what=_localized(document["what"]),
        why=_localized(document["why"]),
        arithmetic=_localized(document["arithmetic"]) if document["arithmetic"] else None,
        verify=_localized(document["verify"]),
        otherwise=_localized(document["otherwise"]),
    )


def _read_example(document: Mapping[str, Any] | None) -> Example | None:
    if document is None:
        return None
    figures = {name: ExampleFigure(item["value"], item["formula"]) for name, item in document["figures"].items()}
    return Example(_localized(document["text"]), figures, document["plan"])


def catalog_problems(documents: Mapping[str, Any] | None = None) -> list[str]:
    """Problems of the entry files, each with its file name."""
    documents = bundled_documents() if documents is None else documents
    problems = {
        name: document_problems(document, "schema.json", entry_of_document) for name, document in documents.items()
    }
    valid = {name: document for name, document in documents.items() if not problems[name]}
    ids = {document["id"] for document in valid.values()}
    for name, document in valid.items():
        problems[name] = [*_reference_problems(name, document, ids), *_signature_problems(document)]
    return [f"{name}: {problem}" for name, found in problems.items() for problem in found]


def _reference_problems(name: str, document: Mapping[str, Any], ids: set[str]) -> Iterator[str]:
    """What is wrong with an entry's file name, its transitions and its example, a sentence each."""
    if name != f"{document['id']}.json":
        yield f"holds the entry {document['id']}"
    for kind, others in document["transitions"].items():
        yield from (f"{kind} names {other}, which is not in the catalog" for other in others if other not in ids)
        if document["id"] in others:
            yield f"{kind} names itself"
    example = document["example"] or {"text": {}, "figures": {}}
    for text in example["text"].values():
        yield from (
            f"the example names no figure {figure!r}" for figure in example["figures"] if f"{{{figure}}}" not in text
        )


def _signature_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Signatures that are not RE2, miss their own example or name an unknown log message."""
    from legroom.facts.log_messages import message_patterns
    from legroom.regex import compiled, pattern_error

    known = {message.id for message in message_patterns()}
    for signature in document["signatures"]:
        error = pattern_error(signature["pattern"])
        if error:
            yield f"the pattern {signature['pattern']!r} is not RE2: {error}"
        elif not compiled(signature["pattern"]).search(signature["example"]):
            yield f"the pattern {signature['pattern']!r} does not match its own example"
        yield from (f"there is no message {name!r}" for name in signature["messages"] if name not in known)


def _nearest_entries_hint(wanted: str, every: tuple[Entry, ...]) -> str:
    """A hint with up to three entries of a similar id or number."""
    import difflib

    names = {known.id.lower(): known for known in every}
    if wanted.removeprefix("lr").isdigit() and len(wanted) <= 12:
        number = int(wanted.removeprefix("lr"))
        close = sorted((name for name in names if name[2:].isdigit()), key=lambda name: abs(int(name[2:]) - number))[:3]
    else:
        close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    if not close:
        return "legroom explain --list shows every entry, --search WORDS finds one"
    return "did you mean " + ", ".join(f"{names[name].id} ({names[name].title.en})" for name in close) + "?"
