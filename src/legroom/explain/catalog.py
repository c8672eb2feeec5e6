"""Reading the catalog: legroom's own entries, and the records this user imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from legroom.errors import LegroomError
from legroom.explain.catalog_files import bundled_documents
from legroom.explain.entry import (
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
)

_LONGEST_ID = 12


@cache
def bundled() -> tuple[Entry, ...]:
    """legroom's own entries, by id."""
    return tuple(entry_of(document) for document in bundled_documents().values())


def entries() -> tuple[Entry, ...]:
    """legroom's own entries, then what this user imported."""
    from legroom.explain.deadends import imported  # a run's diagnosis does without

    return (*bundled(), *imported())


def entry(name: str) -> Entry:
    """The entry with this id, whatever its case; an unknown one is told with the nearest."""
    wanted = name.strip().lower()
    every = entries()
    for known in every:
        if known.id.lower() == wanted:
            return known
    raise LegroomError(f"the catalog has no entry {name!r}", _nearest(wanted, every))


def with_outcomes(known: Entry) -> Entry:
    """The entry with what this user's own tries came to, counted beside the threads."""
    from legroom.explain.outcomes import CATALOG_KINDS, read_outcomes  # a diagnosis does without

    own = tuple(
        (CATALOG_KINDS.get(outcome.fix, outcome.fix), outcome.worked)
        for outcome in read_outcomes()
        if outcome.entry == known.id
    )
    return replace(known, outcomes=own) if own else known


def entries_of(label: str) -> tuple[Entry, ...]:
    """The entries that tell of one cause label, the general one first."""
    every = entries()
    own = [known for known in every if known.label == label]
    return (*own, *(known for known in every if label in known.also))


def best_entry(label: str, message_ids: frozenset[str], default: str) -> Entry:
    """Of a label's entries, the one whose signatures these messages are; `default` where none stands out.

    Several stories may share a label: a busy card at start and an orphaned worker, for instance.
    """
    candidates = entries_of(label)
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


def entry_of(document: Mapping[str, Any]) -> Entry:
    """One entry file as an object."""
    transitions = document["transitions"]
    documentation = document["documentation"] or {"url": None, "section": None}
    return Entry(
        id=document["id"],
        label=document["label"],
        phase=document["phase"],
        title=_text(document["title"]),
        signatures=tuple(
            Signature(_text(item["text"]), item["pattern"], item["example"], tuple(item["messages"]))
            for item in document["signatures"]
        ),
        domain=document["domain"],
        category=document["category"],
        subcategory=document["subcategory"],
        cause_type=document["root_cause"]["type"],
        cause=_text(document["root_cause"]),
        versions=tuple(Version(**item) for item in document["versions"]),
        os_specific=document["os_specific"],
        dead_ends=tuple(
            EntryDeadEnd(
                _text(item["action"]), _text(item["why_fails"]), _text(item["condition"]), item["kind"], item["myth"]
            )
            for item in document["dead_ends"]
        ),
        workarounds=tuple(
            Workaround(_text(item["action"]), _text(item["how"]), _text(item["condition"]), item["kind"])
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
        story=_story(document["story"]),
        example=_example(document["example"]),
    )


def _text(value: Mapping[str, str]) -> Localized:
    return Localized(value["en"], value["zh"])


def _story(document: Mapping[str, Any]) -> Story:
    return Story(
        what=_text(document["what"]),
        why=_text(document["why"]),
        arithmetic=_text(document["arithmetic"]) if document["arithmetic"] else None,
        verify=_text(document["verify"]),
        otherwise=_text(document["otherwise"]),
    )


def _example(document: Mapping[str, Any] | None) -> Example | None:
    if document is None:
        return None
    figures = {name: ExampleFigure(item["value"], item["formula"]) for name, item in document["figures"].items()}
    return Example(_text(document["text"]), figures, document["plan"])


def _nearest(wanted: str, every: tuple[Entry, ...]) -> str:
    import difflib  # only on the way to an error message

    names = {known.id.lower(): known for known in every}
    if wanted.removeprefix("lr").isdigit() and len(wanted) <= _LONGEST_ID:
        number = int(wanted.removeprefix("lr"))
        close = sorted((name for name in names if name[2:].isdigit()), key=lambda name: abs(int(name[2:]) - number))[:3]
    else:
        close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    if not close:
        return "legroom explain --list shows every entry, --search WORDS finds one"
    return "did you mean " + ", ".join(f"{names[name].id} ({names[name].title.en})" for name in close) + "?"
