"""The catalog of causes."""

from __future__ import annotations

from typing import Any


def catalog(request: dict[str, Any]) -> dict[str, Any]:
    """All entries in short, or those that fit the words of a query, the best first."""
    from legroom.explain.catalog_entries import entries
    from legroom.explain.catalog_search import search
    from legroom.explain.entry import summary_json

    language, query, known = request.get("language", "en"), request.get("query", "").strip(), entries()
    chosen = [hit.entry for hit in search(query, known, limit=len(known))] if query else list(known)
    return {"entries": [summary_json(entry, language) for entry in chosen]}


def entry(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom explain ID --json`."""
    from legroom.explain.catalog_entries import entry as known_entry
    from legroom.explain.entry import entry_json

    return entry_json(known_entry(request["id"]), request.get("language", "en"))
