"""Constants fitted to real start-ups, with their residuals. Data in `data/fit.json`, written by `bench/fit.py`."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def constants() -> dict[str, Any]:
    """Every fitted constant, by what it describes."""
    text = resources.files("legroom.facts").joinpath("data/fit.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
