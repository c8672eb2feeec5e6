"""What no formula gives: constants fitted to real start-ups or read off logs, and how far off each kind of figure is.

The constants are in `data/fit.json` (`bench/fit.py`), the bands in `data/bands.json` (`bench/fit_bands.py`). A class of
deployments is a path such as `read/text/one/ampere`; each step down splits it further. A step that was never seen has
no row of its own, and takes the wide row of the step above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from legroom.facts.data_files import read_data
from legroom.facts.releases import release as known_release
from legroom.records import dataclass


@cache
def constants() -> dict[str, Any]:
    """Every fitted constant, by what it describes."""
    fitted: dict[str, Any] = read_data("fit.json")
    return fitted


def by_release(rows: Sequence[dict[str, Any]], version: str) -> dict[str, Any]:
    """The last row whose `since` is not after `version`; rows are in order of release."""
    at = known_release(version)
    return [row for row in rows if at.at_least(row["since"])][-1]


ROOT = ""
"""The class of everything."""


@dataclass(frozen=True, slots=True)
class BandRow:
    """What one class showed."""

    below: float
    """How far below the figure the 90 % band reaches, in units of the error that its own rule expects (of the weights:
    in shares of their bytes)."""
    above: float
    most: float
    """Neither side is more than this share of the card: half as much again as the largest error of the class."""
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


def band(
    figure_rows: Mapping[str, BandRow], path: Sequence[str], scale: float, total_bytes: int, least: float = 0.0
) -> tuple[int, int]:
    """The bytes below and above a figure that the 90 % band takes in, where the figure's own rule expects an error of
    `scale`. A class that was never seen gets more than the class above it, `least` scales at the least."""
    row, seen = row_at(figure_rows, path)
    if seen:
        most = row.most * total_bytes
        return int(min(row.below * scale, most)), int(min(row.above * scale, most))
    factor = bands()["unseen"]["factor"]
    return int(max(factor * row.below, least) * scale), int(max(factor * row.above, least) * scale)


def sum_band(
    figure_rows: Mapping[str, BandRow], path: Sequence[str], scale: float, total_bytes: int
) -> tuple[int, int]:
    """The same for the whole sum, which is a share of the card at the least: a small one in a class that was seen."""
    below, above = band(figure_rows, path, scale, total_bytes)
    if not scale:
        return below, above
    kind = "seen" if row_at(figure_rows, path)[1] else "unseen"
    least = int(bands()[kind]["least_of_card"] * total_bytes)
    return max(below, least), max(above, least)
