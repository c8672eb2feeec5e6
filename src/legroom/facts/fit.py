"""Constants that no formula gives: fitted to real start-ups by `bench/fit.py`, or read off logs. In `data/fit.json`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from legroom.facts.data_files import read_data
from legroom.facts.releases import release as known_release


@cache
def constants() -> dict[str, Any]:
    """Every fitted constant, by what it describes."""
    fitted: dict[str, Any] = read_data("fit.json")
    return fitted


def by_release(rows: Sequence[dict[str, Any]], version: str) -> dict[str, Any]:
    """The last row whose `since` is not after `version`; rows are in order of release."""
    at = known_release(version)
    return [row for row in rows if at.at_least(row["since"])][-1]
