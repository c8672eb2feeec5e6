"""Texts of a diagnosis that do not depend on its numbers: headings by language, and failures that are not memory."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from legroom.facts import read_data
from legroom.json_records import record_from_json
from legroom.records import dataclass, field
from legroom.regex import compiled

Language = Literal["en", "zh"]


def heading(name: str, language: Language) -> str:
    """The title of a section of the printed diagnosis, by the section's name."""
    return str(read_data("diagnosis_texts.json")["headings"][language][name])


def phase_title(phase: str | None, language: Language) -> str:
    """The name of the start-up or serving phase in which vLLM failed; empty for None."""
    return str(read_data("diagnosis_texts.json")["phases"][phase][language]) if phase else ""


def how_to_verify(kind: str, language: Language, cause: str = "", platform: str = "") -> str:
    """How to check that a fix of this kind helped (some causes have a check of their own), with the platform's tool."""
    texts = read_data("diagnosis_texts.json")
    how = str(texts["verify"][texts["verified_by"].get(cause, kind)][language])
    return re.sub(r"nvidia-smi [\w=., -]*\w", texts["card_tools"].get(platform, r"\g<0>"), how)


def other_engines() -> tuple[str, ...]:
    """Ids of the messages that only engines other than vLLM print."""
    return tuple(name for name in read_data("diagnosis_texts.json")["other_engines"] if name != "source")


def other_engine_name(id_: str) -> str:
    """The name of the engine that prints the message with this id."""
    return str(read_data("diagnosis_texts.json")["other_engines"][id_]["name"])


def other_engine_text(id_: str, language: Language) -> str:
    """The sentence that answers a log of another engine than vLLM; `id_`: the id of that engine's message."""
    return str(read_data("diagnosis_texts.json")["other_engines"][id_][language])


def other_engine_meaning(id_: str, log: str) -> tuple[str, ...]:
    """What the engine's first known message in this log means, as a tuple of one text; empty where it has none."""
    rows = read_data("diagnosis_texts.json")["other_engines"][id_].get("messages", ())
    return tuple(meaning for words, meaning in rows if compiled(words).search(log))[:1]


@dataclass(frozen=True, slots=True)
class LookalikeFix:
    """One fix. `{name}` in a text is filled from the log line or from facts of the release."""

    kind: str
    why: str
    steps: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    is_for_given: bool = False
    """Only where the failed run was given these flags."""


@dataclass(frozen=True, slots=True)
class Lookalike:
    """A failure that resembles an out-of-memory error and that no memory flag fixes. Data in `data/lookalikes.json`."""

    id: str
    cause: str
    """The diagnosis label."""
    evidence: tuple[str, ...]
    """Ids of the messages in `evidence.json` that prove it."""
    why: str
    fixes: tuple[LookalikeFix, ...]
    source: str = ""
    """Where vLLM raises it; a wheel leaves it out."""
    strength: str = "NAMED"
    """How strongly such a line shows it: a name of `diagnosis.finding.Strength`."""
    unnamed: Mapping[str, str] = field(default_factory=dict)
    """Values for a `{name}` that the log line does not give."""


@cache
def lookalikes() -> tuple[Lookalike, ...]:
    """Every kind of failure that only looks like a memory failure; the more specific comes before the general."""
    return tuple(record_from_json(Lookalike, row) for row in read_data("lookalikes.json")["rows"])


def package_of(module: str) -> str:
    """The package to install for a Python module: a known other name, else the module's first part with hyphens."""
    names = read_data("lookalikes.json")["packages"]["names"]
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in names:
            return str(names[name])
    return parts[0].replace("_", "-")
