"""Reads and validates the catalog: legroom's own entries and the records that the user imported."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from legroom.errors import LegroomError
from legroom.explain import entry as catalog
from legroom.facts import read_texts
from legroom.facts.log_messages import message_patterns
from legroom.json_records import record_from_json
from legroom.memo import Memo
from legroom.records import dataclass
from legroom.regex import compiled, pattern_error


def bundled_documents() -> dict[str, Any]:
    """File name -> parsed JSON of every bundled catalog entry."""
    return {f"{name}.json": json.loads(text) for name, text in read_texts(catalog.CATALOG_FOLDER / "entries").items()}


@cache
def bundled() -> tuple[catalog.Entry, ...]:
    """legroom's own catalog entries."""
    return tuple(entry_of_document(document) for document in bundled_documents().values())


def entries() -> tuple[catalog.Entry, ...]:
    """All catalog entries: legroom's own, then the imported ones."""
    from legroom.explain.deadends import imported_entries  # costs time that a diagnosis does not need

    return (*bundled(), *imported_entries())


def entry(entry_id: str) -> catalog.Entry:
    """The entry with this id (`LR203`, in any case); LegroomError, with the nearest ids, for an unknown one."""
    wanted = entry_id.strip().lower()
    every = entries()
    for known in every:
        if known.id.lower() == wanted:
            return known
    raise LegroomError(f"the catalog has no entry {entry_id!r}", _nearest_entries_hint(wanted, every))


def entries_of_label(label: str) -> tuple[catalog.Entry, ...]:
    """The entries with this cause label, then those that explain it as well (by their field `also`)."""
    every = entries()
    own = [known for known in every if known.label == label]
    return (*own, *(known for known in every if label in known.also))


def title_of_label(label: str) -> str:
    """The title of the first entry with this cause label; the label as words where there is none."""
    known = entries_of_label(label)
    return known[0].title.en if known else label.replace("_", " ")


def best_entry(label: str, message_ids: frozenset[str], default_id: str) -> catalog.Entry:
    """The label's entry whose signatures have most of these log messages; entry `default_id` if none has any."""

    def shared_messages(candidate: catalog.Entry) -> int:
        """How many of the log messages the candidate's signatures name."""
        return len(message_ids & {name for signature in candidate.signatures for name in signature.messages})

    candidates = [each for each in entries_of_label(label) if shared_messages(each)]
    best = max(candidates, key=lambda each: (shared_messages(each), each.id == default_id), default=None)
    return entry(default_id) if best is None else best


def entry_of_document(document: Mapping[str, Any]) -> catalog.Entry:
    """The entry in the JSON of a catalog file; most keys are fields of the entry, the others are renamed."""
    cause, documentation = document["root_cause"], document["documentation"] or {}
    renamed = {
        **document["transitions"],
        "cause": cause,
        "cause_type": cause["type"],
        "documentation": documentation.get("url"),
        "documentation_section": documentation.get("section"),
        "threads": [{**item, "url": item["thread"]} for item in document["evidence"]],
    }
    return record_from_json(catalog.Entry, {**document, **renamed})


def catalog_problems(documents: Mapping[str, Any] | None = None) -> list[str]:
    """`FILE: problem` for each problem in `documents` (parsed JSON by file name; None: the bundled ones)."""
    documents = bundled_documents() if documents is None else documents
    check = partial(catalog.document_problems, schema_file="schema.json", build=entry_of_document)
    problems = {name: check(document) for name, document in documents.items()}
    valid = {name: document for name, document in documents.items() if not problems[name]}
    ids = {document["id"] for document in valid.values()}
    for name, document in valid.items():
        problems[name] = [*_reference_problems(name, document, ids), *_signature_problems(document)]
    return [f"{name}: {problem}" for name, found in problems.items() for problem in found]


def _reference_problems(name: str, document: Mapping[str, Any], ids: set[str]) -> Iterator[str]:
    """Sentences on what is wrong with an entry's file name, its transitions (ids not in `ids`), its example."""
    if name != f"{document['id']}.json":
        yield f"holds the entry {document['id']}"
    for kind, others in document["transitions"].items():
        yield from (f"{kind} names {other}, which is not in the catalog" for other in others if other not in ids)
        if document["id"] in others:
            yield f"{kind} names itself"
    example = document["example"] or {"text": {}, "figures": {}}
    for text in example["text"].values():
        unnamed = (figure for figure in example["figures"] if f"{{{figure}}}" not in text)
        yield from (f"the example names no figure {figure!r}" for figure in unnamed)


def _signature_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on signatures that are not RE2, miss their own example or name an unknown log message."""
    known = {message.id for message in message_patterns()}
    for signature in document["signatures"]:
        if error := pattern_error(signature["pattern"]):
            yield f"the pattern {signature['pattern']!r} is not RE2: {error}"
        elif not compiled(signature["pattern"]).search(signature["example"]):
            yield f"the pattern {signature['pattern']!r} does not match its own example"
        yield from (f"there is no message {name!r}" for name in signature["messages"] if name not in known)


def _nearest_entries_hint(unknown_id: str, all_entries: tuple[catalog.Entry, ...]) -> str:
    """`did you mean ...` with up to three entries of ids like `unknown_id`, else how to find entries."""
    import difflib

    names = {known.id.lower(): known for known in all_entries}
    if unknown_id.removeprefix("lr").isdecimal() and len(unknown_id) <= 12:
        number = int(unknown_id.removeprefix("lr"))
        numbers = {name: int(name[2:]) for name in names if name[2:].isdecimal()}
        close = sorted(numbers, key=lambda name: abs(numbers[name] - number))[:3]
    else:
        close = difflib.get_close_matches(unknown_id, names, n=3, cutoff=0.5)
    if not close:
        return "legroom explain shows every entry, legroom explain WORDS finds one"
    return "did you mean " + ", ".join(f"{names[name].id} ({names[name].title.en})" for name in close) + "?"


_WORD = re.compile(r"[a-z0-9]+|[一-鿿]+")
_STEM_LENGTH = 4
_LONGEST_LINE = 4000
_EXACT_NAME, _NAME_INSIDE, _LINE_MATCH = 60.0, 12.0, 40.0


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry that a search found, and how well it matches."""

    entry: catalog.Entry
    score: float


@dataclass(frozen=True, slots=True)
class _Index:
    pages: tuple[Counter[str], ...]
    """The words of each entry with their weights."""
    rarity: Mapping[str, float]
    by_stem: Mapping[str, list[str]]
    """Words by their first letters."""


_INDEXES: Memo[_Index] = Memo(most=4)


def search(query: str, entries: Sequence[catalog.Entry], limit: int = 10) -> list[Hit]:
    """At most `limit` catalog entries that match the query, best scores first."""
    index = _INDEXES.get(tuple(entries), (), lambda: _build_index(entries))
    wanted = {term: _similar_words(term, index) for term in search_terms(query)}
    hits = []
    for entry, page in zip(entries, index.pages, strict=True):
        score = _name_score(query, entry) + (_LINE_MATCH if _matches_signature(query, entry) else 0.0)
        for term, similar in wanted.items():  # half the weight of the heaviest similar word where it has not the term
            weight = page[term] or max((page[word] / 2 for word in similar if word in page), default=0)
            score += weight * index.rarity.get(term, 1.0)
        if score > 0:
            hits.append(Hit(entry, round(score, 2)))
    return sorted(hits, key=lambda hit: (-hit.score, hit.entry.id))[:limit]


def search_json(query: str, hits: Sequence[Hit], language: catalog.Language) -> dict[str, Any]:
    """The document of `legroom explain --search --json`."""
    return {"query": query, "hits": [{**catalog.summary_json(hit.entry, language), "score": hit.score} for hit in hits]}


def _build_index(entries: Sequence[catalog.Entry]) -> _Index:
    """Each entry's weighted terms, each term's rarity, and the terms by their first letters."""
    pages = tuple(_weighted_terms(entry) for entry in entries)
    seen = Counter(term for page in pages for term in page)
    by_stem: dict[str, list[str]] = {}
    for term in seen:
        if len(term) >= _STEM_LENGTH:
            by_stem.setdefault(term[:_STEM_LENGTH], []).append(term)
    return _Index(pages, {term: math.log(1 + len(pages) / times) for term, times in seen.items()}, by_stem)


def search_terms(text: str) -> list[str]:
    """The words of a text that search compares: Latin words, and pairs of adjacent Chinese characters."""
    words: list[str] = []
    for word in _WORD.findall(text.lower().replace("_", " ")):
        is_whole = word[0] < "一" or len(word) == 1
        words += [word] if is_whole else [word[i : i + 2] for i in range(len(word) - 1)]
    return list(dict.fromkeys(words))


def _weighted_terms(entry: catalog.Entry) -> Counter[str]:
    """Search term -> weight of the entry's heaviest field that has the term."""
    fields: list[tuple[float, Iterable[str]]] = [
        (8.0, (entry.title.en, entry.title.zh, entry.label)),
        (7.0, entry.aliases),
        (6.0, (text for s in entry.signatures for text in (s.text.en, s.text.zh, s.example, s.pattern))),
        (5.0, entry.tags),
        (3.0, (entry.cause.en, entry.cause.zh)),
        (2.0, (text for d in entry.dead_ends for text in (d.action.en, d.action.zh))),
        (2.0, (text for w in entry.workarounds for text in (w.action.en, w.action.zh, w.how.en))),
        (1.0, (d.why_fails.en for d in entry.dead_ends)),
        (1.0, _story_texts(entry)),
    ]
    page: Counter[str] = Counter()
    for weight, texts in fields:
        for term in {term for text in texts for term in search_terms(text)}:
            page[term] = max(page[term], weight)  # type: ignore[assignment]
    return page


def _story_texts(entry: catalog.Entry) -> list[str]:
    """What, why and arithmetic of the entry's story in both languages; empty without a story."""
    if entry.story is None:
        return []
    parts = (entry.story.what, entry.story.why, entry.story.arithmetic)
    return [text for part in parts if part for text in (part.en, part.zh)]


def _similar_words(term: str, index: _Index) -> list[str]:
    """Catalog terms that share the term's first four letters, and of which one begins with the other."""
    words = index.by_stem.get(term[:_STEM_LENGTH], ())
    return [word for word in words if word.startswith(term) or term.startswith(word)]


def _name_score(query: str, entry: catalog.Entry) -> float:
    """A fixed score if the query is the entry's id, label or alias, a lower one if it is part of one; else 0."""
    wanted = " ".join(query.lower().replace("_", " ").split())
    names = [" ".join(name.lower().replace("_", " ").split()) for name in (entry.id, entry.label, *entry.aliases)]
    if wanted in names:
        return _EXACT_NAME
    return _NAME_INSIDE if len(wanted) >= _STEM_LENGTH and any(wanted in name for name in names) else 0.0


def _matches_signature(line: str, entry: catalog.Entry) -> bool:
    """Whether a log line of at least 12 characters matches one of the entry's signature patterns."""
    patterns = (compiled(signature.pattern) for signature in entry.signatures)
    return len(line) >= 12 and any(pattern.search(line[:_LONGEST_LINE]) for pattern in patterns)
