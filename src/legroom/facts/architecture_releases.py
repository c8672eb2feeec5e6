"""Since which release vLLM lists an architecture."""

from __future__ import annotations

from functools import cache

from legroom.facts.data_files import read_data


@cache
def _since() -> dict[str, str]:
    document = read_data("architecture_releases.json")["since"]
    return {name: version for version, names in document.items() for name in names}


def first_release(architecture: str) -> str | None:
    """The release that first lists it; None: it was always there, or is newer than the facts, or unknown."""
    return _since().get(architecture)
