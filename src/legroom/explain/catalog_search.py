"""Search of the catalog by words in English or Chinese, by a label or alias, or by a line of a log."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from legroom.explain.entry import Entry, Language, summary_json
from legroom.memo import Memo
from legroom.records import dataclass

_WORD = re.compile(r"[a-z0-9]+|[一-鿿]+")
_STEM_LENGTH = 4
_LONGEST_LINE = 4000
_EXACT_NAME, _NAME_INSIDE, _LINE_MATCH = 60.0, 12.0, 40.0


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry with its search score."""

    entry: Entry
    score: float


@dataclass(frozen=True, slots=True)
class _Index:
    """Term weights of all entries."""

    pages: tuple[Counter[str], ...]
    """The words of each entry with their weights."""
    rarity: Mapping[str, float]
    by_stem: Mapping[str, list[str]]
    """Words by their first letters."""


_INDEXES: Memo[_Index] = Memo(most=4)


def search(query: str, entries: Sequence[Entry], limit: int = 10) -> list[Hit]:
    """The entries with the highest scores, best first."""
    index = _INDEXES.get(tuple(entries), (), lambda: _build_index(entries))
    wanted = {term: _similar_words(term, index) for term in search_terms(query)}
    hits = []
    for entry, page in zip(entries, index.pages, strict=True):
        words = sum(_term_score(term, similar, page) * index.rarity.get(term, 1.0) for term, similar in wanted.items())
        score = words + _name_score(query, entry) + (_LINE_MATCH if _matches_signature(query, entry) else 0.0)
        if score > 0:
            hits.append(Hit(entry, round(score, 2)))
    return sorted(hits, key=lambda hit: (-hit.score, hit.entry.id))[:limit]


def search_json(query: str, hits: Sequence[Hit], language: Language) -> dict[str, Any]:
    """The document of `legroom explain --search --json`."""
    return {"query": query, "hits": [{**summary_json(hit.entry, language), "score": hit.score} for hit in hits]}


def _build_index(entries: Sequence[Entry]) -> _Index:
    """Weighted terms of every entry, the rarity of each term, and the terms by stem."""
    pages = tuple(_weighted_terms(entry) for entry in entries)
    seen = Counter(term for page in pages for term in page)
    by_stem: dict[str, list[str]] = {}
    for term in seen:
        if len(term) >= _STEM_LENGTH:
            by_stem.setdefault(term[:_STEM_LENGTH], []).append(term)
    return _Index(pages, {term: math.log(1 + len(pages) / times) for term, times in seen.items()}, by_stem)


def search_terms(text: str) -> list[str]:
    """Latin words, and pairs of adjacent Chinese characters."""
    words: list[str] = []
    for word in _WORD.findall(text.lower().replace("_", " ")):
        if word[0] < "一" or len(word) == 1:
            words.append(word)
        else:
            words += [word[i : i + 2] for i in range(len(word) - 1)]
    return list(dict.fromkeys(words))


def _weighted_terms(entry: Entry) -> Counter[str]:
    """Each search term of the entry with the weight of the heaviest field it is in."""
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


def _story_texts(entry: Entry) -> list[str]:
    """What, why and arithmetic of the entry's story in both languages; empty without a story."""
    if entry.story is None:
        return []
    parts = (entry.story.what, entry.story.why, entry.story.arithmetic)
    return [text for part in parts if part for text in (part.en, part.zh)]


def _similar_words(term: str, index: _Index) -> list[str]:
    """Words of the catalog that begin with the term, or that the term begins with."""
    words = index.by_stem.get(term[:_STEM_LENGTH], ())
    return [word for word in words if word.startswith(term) or term.startswith(word)]


def _term_score(term: str, similar: Sequence[str], page: Counter[str]) -> float:
    """The term's weight on the page, half that of the best similar term, or 0."""
    if term in page:
        return float(page[term])
    return max((page[word] / 2 for word in similar if word in page), default=0)


def _name_score(query: str, entry: Entry) -> float:
    """Bonus where the query is the entry's id, label or alias, a smaller one where it is part of it; else 0."""
    wanted = " ".join(query.lower().replace("_", " ").split())
    names = [" ".join(name.lower().replace("_", " ").split()) for name in (entry.id, entry.label, *entry.aliases)]
    if wanted in names:
        return _EXACT_NAME
    return _NAME_INSIDE if len(wanted) >= _STEM_LENGTH and any(wanted in name for name in names) else 0.0


def _matches_signature(line: str, entry: Entry) -> bool:
    """Whether a log line matches one of the entry's patterns; never for under 12 characters."""
    if len(line) < 12:
        return False
    from legroom.regex import compiled

    return any(compiled(signature.pattern).search(line[:_LONGEST_LINE]) for signature in entry.signatures)
