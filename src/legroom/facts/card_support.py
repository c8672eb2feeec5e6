"""Which compute capabilities the published builds of a release hold kernels for. Data in `data/card_support.json`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from legroom.facts.data_files import read_data

if TYPE_CHECKING:
    from legroom.facts.releases import Release


@cache
def _data() -> dict[str, Any]:
    document: dict[str, Any] = read_data("card_support.json")
    return document


def built_for(release: Release) -> tuple[tuple[int, int], tuple[int, int]]:
    """The oldest and the newest compute capability that the release's wheels and images run on."""
    bounds = []
    for end in ("oldest", "newest"):
        capability = [row[1] for row in _data()[end] if release.at_least(row[0])][-1]
        bounds.append((int(capability[0]), int(capability[1])))
    return bounds[0], bounds[1]
