"""Finding entries: by words in English or Chinese, by a label or alias, or by a pasted line of a log."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from legroom.explain.entry import Entry
from legroom.records import dataclass

_WORD = re.compile(r"[a-z0-9]+|[一-鿿]+")
_STEM_LENGTH = 4
_LONGEST_LINE = 4000
_EXACT_NAME, _NAME_INSIDE, _LINE_MATCH = 60.0, 12.0, 40.0


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry that was found, and how well it fits."""

    entry: Entry
    score: float


def search(query: str, entries: Sequence[Entry], limit: int = 10) -> list[Hit]:
    """The entries that fit best, the best first."""
    wanted = terms(query)
    pages = [_weighted_terms(found) for found in entries]
    rarity = _rarity(pages)
    hits = []
    for found, page in zip(entries, pages, strict=True):
        words = sum(_match(term, page) * rarity.get(term, 1.0) for term in wanted)
        score = words + _by_name(query, found) + (_LINE_MATCH if _says(query, found) else 0.0)
        if score > 0:
            hits.append(Hit(found, round(score, 2)))
    return sorted(hits, key=lambda hit: (-hit.score, hit.entry.id))[:limit]


def terms(text: str) -> list[str]:
    """Words of Latin script, and pairs of neighbouring Chinese characters (single ones where alone)."""
    found: list[str] = []
    for word in _WORD.findall(text.lower().replace("_", " ")):
        if word[0] < "一" or len(word) == 1:
            found.append(word)
        else:
            found += [word[i : i + 2] for i in range(len(word) - 1)]
    return list(dict.fromkeys(found))


def _weighted_terms(entry: Entry) -> Counter[str]:
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
        for term in {term for text in texts for term in terms(text)}:
            page[term] = max(page[term], weight)  # type: ignore[assignment]
    return page


def _story_texts(entry: Entry) -> list[str]:
    if entry.story is None:
        return []
    parts = (entry.story.what, entry.story.why, entry.story.arithmetic)
    return [text for part in parts if part for text in (part.en, part.zh)]


def _rarity(pages: Sequence[Counter[str]]) -> dict[str, float]:
    seen = Counter(term for page in pages for term in page)
    return {term: math.log(1 + len(pages) / times) for term, times in seen.items()}


def _match(term: str, page: Counter[str]) -> float:
    if term in page:
        return float(page[term])
    if len(term) < _STEM_LENGTH or term[0] >= "一":
        return 0.0
    return max(
        (weight / 2 for word, weight in page.items() if word.startswith(term) or _is_start(word, term)), default=0
    )


def _is_start(word: str, term: str) -> bool:
    return len(word) >= _STEM_LENGTH and term.startswith(word)


def _by_name(query: str, entry: Entry) -> float:
    asked = " ".join(query.lower().replace("_", " ").split())
    names = [" ".join(name.lower().replace("_", " ").split()) for name in (entry.id, entry.label, *entry.aliases)]
    if asked in names:
        return _EXACT_NAME
    return _NAME_INSIDE if len(asked) >= _STEM_LENGTH and any(asked in name for name in names) else 0.0


def _says(line: str, entry: Entry) -> bool:
    if len(line) < 12:
        return False
    try:
        import re2 as engine  # noqa: PLC0415 - a listing does without
    except ImportError:
        engine = re
    return any(engine.search(signature.pattern, line[:_LONGEST_LINE]) for signature in entry.signatures)
