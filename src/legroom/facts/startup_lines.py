"""What a starting vLLM prints, by meaning: one pattern a line, for every release that words it so."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from legroom.facts.data_files import read_data
from legroom.records import dataclass

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
        StartupLine(
            line["id"],
            line["mark"],
            line["kind"],
            re.compile(line["pattern"]),
        )
        for line in read_data("startup_lines.json")["lines"]
    )
