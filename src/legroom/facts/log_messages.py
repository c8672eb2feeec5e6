"""What a log can say about memory, or in words that sound like it: messages of vLLM, torch, CUDA, NCCL and the host.

Data in `data/evidence.json`. Patterns are RE2, which matches in linear time whatever the line holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from legroom.facts.data_files import read_data
from legroom.records import dataclass
from legroom.units import GIB

Value = int | float | str
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d*)?")
_UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 1 << 10,
    "MB": 1 << 20,
    "GB": 1 << 30,
    "TB": 1 << 40,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}


def typed(groups: Mapping[str, str]) -> dict[str, Value]:
    """Numbers with their units, by the ending of each group's name; one that does not read is left out."""
    values: dict[str, Value] = {}
    for name, text in groups.items():
        stem, _, unit = name.rpartition("_")
        try:
            if unit == "gib":
                values[f"{stem}_bytes"] = round(float(text) * GIB)
            elif unit == "size":
                values[f"{stem}_bytes"] = size_bytes(text)
            elif unit == "count":
                values[name] = int(text.replace(",", "")[:18])
            elif unit == "ratio":
                values[name] = float(text.rstrip("."))
            else:
                values[name] = text
        except (ValueError, OverflowError):
            continue
    return values


def size_bytes(text: str) -> int:
    """`1.96 GiB` in bytes."""
    number = _NUMBER.match(text.strip())
    if number is None:
        raise ValueError(text)
    unit = text.strip()[number.end() :].strip() or "bytes"
    if unit not in _UNITS:
        raise ValueError(text)
    return round(float(number[0].replace(",", "")) * _UNITS[unit])


LineKind = Literal["settings", "gpu", "memory", "capacity", "ready", "failure"]


@dataclass(frozen=True, slots=True)
class StartupLine:
    """One line worth reading. A group's ending tells its unit: `_gib`, `_bytes`, `_count`, `_ratio`; else text."""

    id: str
    mark: str
    """Plain text that every matching line holds."""
    kind: LineKind
    pattern: re.Pattern[str]


@cache
def startup_lines() -> tuple[StartupLine, ...]:
    """Every known start-up line, in the order they are tried."""
    return tuple(
        StartupLine(line["id"], line["mark"], line["kind"], re.compile(line["pattern"]))
        for line in read_data("startup_lines.json")["lines"]
    )


Role = Literal[
    "failure",
    "symptom",
    "host",
    "hint",
    "milestone",
    "setting",
    "platform",
    "frame",
    "stats",
    "once",
    "banner",
    "exception",
]


@dataclass(frozen=True, slots=True)
class MessagePattern:
    """One thing a line can say. A group's ending tells its unit: `_gib`, `_size`, `_count`, `_ratio`; else text."""

    id: str
    role: Role
    marks: tuple[str, ...]
    """Plain texts, one of which every matching line holds."""
    pattern: str | None
    """RE2; None: holding a mark is enough."""
    phase: str | None


@dataclass(frozen=True, slots=True)
class OomParts:
    """How the numbers of torch's out-of-memory text are written, old and new wordings."""

    numbers: tuple[str, ...]
    process: str


@cache
def message_patterns() -> tuple[MessagePattern, ...]:
    """Every known message, in the order of the data file."""
    return tuple(
        MessagePattern(
            entry["id"], entry["role"], tuple(entry["marks"]), entry.get("pattern"), entry.get("phase") or None
        )
        for entry in _data()["messages"]
    )


@cache
def message_openings() -> tuple[str, ...]:
    """How the errors that decide a diagnosis begin, `#` for every number."""
    return tuple(_data()["openings"])


@cache
def oom_parts() -> OomParts:
    """The patterns of torch's out-of-memory numbers."""
    return OomParts(tuple(_data()["oom_parts"]), _data()["oom_process"])


@cache
def _data() -> dict:  # type: ignore[type-arg]
    return read_data("evidence.json")  # type: ignore[no-any-return]


def trainer_setting(line: str) -> str | None:
    """The setting of the framework whose files a line of a traceback names; None where it names none."""
    text = line.lower()
    return next((setting for mark, setting in _trainers() if mark in text), None)


@cache
def _trainers() -> tuple[tuple[str, str], ...]:
    return tuple((entry["mark"], entry["setting"]) for entry in read_data("trainers.json")["trainers"])
