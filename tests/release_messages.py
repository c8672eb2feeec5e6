"""What vLLM writes to its log and raises, by release: templates, patterns, fields, for the tests that hold the catalog
against it. `tools/import_atlas.py` writes the data."""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from legroom.facts.releases import known_releases
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """One value inside a message, in the order of the pattern's groups."""

    expression: str
    kind: str = ""
    unit: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseMessage:
    """One text that vLLM writes, in the releases of `spans`."""

    id: str
    level: str
    """`info`, `warning`, ... or `exception:ValueError`."""
    template: str
    regex: str
    spans: tuple[tuple[str, str], ...]
    fields: tuple[Field, ...] = ()
    families: tuple[str, ...] = ()
    """Messages that say the same thing in different releases share a family."""
    topics: tuple[str, ...] = ()

    def pattern(self) -> re.Pattern[str]:
        """The compiled pattern; its groups are `fields` in order."""
        return _compiled(self.regex)


@lru_cache(maxsize=4096)
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


def _message(entry: dict[str, Any], releases: tuple[str, ...]) -> ReleaseMessage:
    fields = tuple(
        Field(f.get("expr", ""), f.get("kind", ""), f.get("unit", ""), f.get("optional", False))
        for f in entry.get("fields", ())
    )
    spans = tuple((releases[first], releases[last]) for first, last in entry["in"])
    return ReleaseMessage(
        entry["id"],
        entry["level"],
        entry["template"],
        entry["regex"],
        spans,
        fields,
        tuple(entry.get("family", ())),
        tuple(entry.get("topics", ())),
    )


@cache
def _load(name: str) -> tuple[ReleaseMessage, ...]:
    text = Path(__file__).with_name("fixtures").joinpath(f"{name}.json").read_text("utf-8")
    releases = known_releases()
    return tuple(_message(entry, releases) for entry in json.loads(text)["messages"])


def core_messages() -> tuple[ReleaseMessage, ...]:
    """The messages about memory, capacity and start-up."""
    return _load("release_messages")


def all_messages() -> tuple[ReleaseMessage, ...]:
    """Every message known, the core ones first."""
    return _load("release_messages") + _load("release_messages_other")


@cache
def family(name: str) -> tuple[ReleaseMessage, ...]:
    """The messages that say one thing, over the releases."""
    return tuple(m for m in core_messages() if name in m.families)
