"""How far off each kind of figure is in each class of deployment: fitted by `bench/fit_bands.py`. In `data/bands.json`.

A class is a path such as `read/text/one/ampere`; each step down splits it further. A step that was never seen has no
row of its own, and takes the wide row of the step above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from legroom.facts.data_files import read_data
from legroom.records import dataclass

ROOT = ""
"""The class of everything."""


@dataclass(frozen=True, slots=True)
class BandRow:
    """What one class showed."""

    width: float
    """Half the 90 % band, in units of the figure's own scale (of the weights: in shares of their bytes)."""
    wide: float
    """The same for a part of this class that was never seen."""
    most: float
    """Half a band is no more than this share of the card: half as much again as the largest error of the class."""
    records: int
    sources: int


@cache
def bands() -> dict[str, Any]:
    """The whole file."""
    fitted: dict[str, Any] = read_data("bands.json")
    return fitted


@cache
def rows_of(figure: str) -> Mapping[str, BandRow]:
    """Every class that was seen for a figure of the layout: `kv_cache`, `activation` ..."""
    return {name: BandRow(**values) for name, values in bands()["figures"][figure].items()}


def row_at(rows: Mapping[str, BandRow], path: Sequence[str]) -> tuple[BandRow, bool]:
    """The row of a class, or of the nearest class above it, and whether the class itself was seen."""
    for steps in range(len(path), 0, -1):
        row = rows.get("/".join(path[:steps]))
        if row is not None:
            return row, steps == len(path)
    return rows[ROOT], not path


def half_band(rows: Mapping[str, BandRow], path: Sequence[str], scale: float, total_bytes: int) -> int:
    """Half the 90 % band in bytes, for a figure whose own rule expects an error of `scale` on a card of that size."""
    row, seen = row_at(rows, path)
    width = row.width if seen else max(row.width, row.wide)
    return int(min(width * scale, row.most * total_bytes))
