"""What the words of a plan mean, such as `outside` and `headroom`."""

from legroom.explain.entry import Language
from legroom.facts import read_data

_MOST_WORDS = 4
"""A longer query is a line of a log or a description."""


def meaning(term: str, language: Language = "en") -> str:
    """The sentences that say what a term of plan_terms.json means."""
    return str(read_data("plan_terms.json")[term][language])


def terms_in(query: str, language: Language) -> dict[str, str]:
    """The terms that a short query names, as they are written there, with their meanings; empty for a long query."""
    words = query.lower().split()
    asked, rows = f" {' '.join(words)} ", read_data("plan_terms.json") if len(words) <= _MOST_WORDS else {}
    written = ((term, name) for term, row in rows.items() for name in row["names"])
    named = {name: term for term, name in written if (f" {name.lower()} " if name.isascii() else name) in asked}
    return {name: meaning(term, language if name.isascii() else "zh") for name, term in named.items()}
