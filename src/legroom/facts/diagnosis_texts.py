"""The sentences of a diagnosis that do not depend on its numbers, by language. Data in `data/diagnosis_texts.json`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from legroom.facts.data_files import read_data

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
