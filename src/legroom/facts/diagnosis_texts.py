"""The sentences of a diagnosis that do not depend on its numbers, by language. Data in `data/diagnosis_texts.json`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from legroom.facts.data_files import read_data
from legroom.records import dataclass, field

Language = Literal["en", "zh"]


def heading(name: str, language: Language) -> str:
    """The title of a part of the answer."""
    return str(_data()["headings"][language][name])


def phase_title(phase: str | None, language: Language) -> str:
    """When it happened."""
    return str(_data()["phases"][phase][language]) if phase else ""


def how_to_verify(kind: str, language: Language) -> str:
    """What to look at after the change."""
    return str(_data()["verify"][kind][language])


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = read_data("diagnosis_texts.json")
    return data


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
    return tuple(_lookalike(row) for row in _lookalikes_data()["rows"])


def package_of(module: str) -> str:
    """What to install for a module that Python does not find."""
    names = _lookalikes_data()["packages"]["names"]
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
def _lookalikes_data() -> Any:
    return read_data("lookalikes.json")
