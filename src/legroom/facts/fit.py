"""Constants fitted to real start-ups, with their residuals. Data in `data/fit.json`, written by `bench/fit.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from legroom.facts.releases import release as known_release


@cache
def constants() -> dict[str, Any]:
    """Every fitted constant, by what it describes."""
    text = resources.files("legroom.facts").joinpath("data/fit.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def by_release(rows: Sequence[dict[str, Any]], version: str) -> dict[str, Any]:
    """The last row whose `since` is not after `version`; rows are in order of release."""
    at = known_release(version)
    return [row for row in rows if at.at_least(row["since"])][-1]
