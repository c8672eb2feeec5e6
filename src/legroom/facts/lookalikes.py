"""Failures that look like memory and are not: what each means and what to do first. Data in `data/lookalikes.json`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from legroom.facts.data_files import read_data
from legroom.records import dataclass, field


@dataclass(frozen=True, slots=True)
class LookalikeFix:
    """One thing to do. `{name}` in a text is filled from the line or from facts of the release."""

    kind: str
    why: str
    steps: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    confidence: float = 0.5


@dataclass(frozen=True, slots=True)
class Lookalike:
    """One kind of failure that no memory flag changes."""

    id: str
    cause: str
    """The label it is filed under."""
    evidence: tuple[str, ...]
    """Messages that mean it, by their ids in `evidence.json`."""
    confidence: float
    why: str
    fixes: tuple[LookalikeFix, ...]
    unnamed: Mapping[str, str]
    """What stands for a `{name}` that the line does not give."""
    source: str


@cache
def lookalikes() -> tuple[Lookalike, ...]:
    """Of two that the same line proves, the more special one first."""
    return tuple(_lookalike(row) for row in _data()["rows"])


def package_of(module: str) -> str:
    """What to install for a module that Python does not find."""
    names = _data()["packages"]["names"]
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in names:
            return str(names[name])
    return parts[0].replace("_", "-")


def _lookalike(row: Mapping[str, Any]) -> Lookalike:
    fixes = tuple(
        LookalikeFix(
            fix["kind"],
            fix["why"],
            tuple(fix.get("steps", ())),
            fix.get("flags", {}),
            fix.get("env", {}),
            fix["confidence"],
        )
        for fix in row["fixes"]
    )
    return Lookalike(
        row["id"],
        row["cause"],
        tuple(row["evidence"]),
        row["confidence"],
        row["why"],
        fixes,
        row.get("unnamed", {}),
        row["source"],
    )


@cache
def _data() -> Any:
    return read_data("lookalikes.json")
