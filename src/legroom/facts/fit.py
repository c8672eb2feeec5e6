"""Constants fitted to real start-ups, and error bands by class of deployment.

The constants are in `data/fit.json` (`bench/fit.py`), the bands in `data/bands.json` (`bench/fit_bands.py`). A class of
deployments is a path such as `read/text/one/ampere`; each step splits it further. A class without records uses the
band of its parent, widened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.releases import release as known_release
from legroom.records import dataclass


@cache
def constants() -> dict[str, Any]:
    """The fitted constants of `data/fit.json`."""
    fitted: dict[str, Any] = read_data("fit.json")
    return fitted


def by_release(rows: Sequence[dict[str, Any]], version: str) -> dict[str, Any]:
    """The last row whose `since` release is `version` or earlier."""
    at = known_release(version)
    return [row for row in rows if at.at_least(row["since"])][-1]


ROOT = ""
"""The class of everything."""


@dataclass(frozen=True, slots=True)
class BandRow:
    """The error band of one class of deployments."""

    below: float
    """The lower side of the 90 % band as a multiple of the figure's own error estimate (weights: of their bytes)."""
    above: float
    most: float
    """The limit of both sides as a share of the card: 1.5 times the largest error of the class."""
    records: int
    sources: int


@cache
def bands() -> dict[str, Any]:
    """The fitted bands of `data/bands.json`."""
    fitted: dict[str, Any] = read_data("bands.json")
    return fitted


@cache
def rows_of(figure: str) -> Mapping[str, BandRow]:
    """The bands of a figure of the layout (`kv_cache`, `activation` ...), by class."""
    return {name: BandRow(**values) for name, values in bands()["figures"][figure].items()}


def row_at(rows: Mapping[str, BandRow], path: Sequence[str]) -> tuple[BandRow, bool]:
    """The band of a class or of its nearest parent, and whether the class itself has records."""
    for steps in range(len(path), 0, -1):
        row = rows.get("/".join(path[:steps]))
        if row is not None:
            return row, steps == len(path)
    return rows[ROOT], not path


def band(
    figure_rows: Mapping[str, BandRow], path: Sequence[str], scale: float, total_bytes: int, least: float = 0.0
) -> tuple[int, int]:
    """Bytes below and above a figure in its 90 % band, given the figure's own error estimate `scale`. A class without
    records gets a wider band than its parent, of at least `least` scales."""
    row, seen = row_at(figure_rows, path)
    if seen:
        most = row.most * total_bytes
        return int(min(row.below * scale, most)), int(min(row.above * scale, most))
    factor = bands()["unseen"]["factor"]
    return int(max(factor * row.below, least) * scale), int(max(factor * row.above, least) * scale)


def sum_band(
    figure_rows: Mapping[str, BandRow], path: Sequence[str], scale: float, total_bytes: int
) -> tuple[int, int]:
    """The band of the sum of all parts, which has a minimum in shares of the card."""
    below, above = band(figure_rows, path, scale, total_bytes)
    if not scale:
        return below, above
    kind = "seen" if row_at(figure_rows, path)[1] else "unseen"
    least = int(bands()[kind]["least_of_card"] * total_bytes)
    return max(below, least), max(above, least)
