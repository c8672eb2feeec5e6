"""What a release says when its KV-cache checks fail. Texts in `facts/data/kv_checks.json`."""

from __future__ import annotations

from functools import cache
from typing import Any

from legroom.facts.data_files import read_data
from legroom.facts.releases import Release
from legroom.units import GIB


@cache
def _checks() -> tuple[dict[str, Any], ...]:
    return tuple(read_data("kv_checks.json")["checks"])


def check_text(check: str, release: Release, **values: object) -> str:
    """The words of one check in one release, with its numbers; empty where the release has no such check."""
    entry = next((e for e in _checks() if e["check"] == check and release.within(e["first"], e["last"])), None)
    if entry is None:
        return ""
    estimate = ""
    if entry.get("estimate") and values.get("estimated_max_len"):
        estimate = str(entry["estimate"]).format(**values)
    return str(entry["text"]).format(estimate=estimate, **values)


def too_long_text(
    release: Release,
    max_model_len: int,
    needed_bytes: int,
    available_bytes: int,
    *,
    estimated_max_len: int,
    capacity: int,
) -> str:
    """One request of the full length does not fit. 0.14+ rounds the figures, earlier releases write two places."""
    needed, available = needed_bytes / GIB, available_bytes / GIB
    if release.at_least("0.14.0"):
        needed, available = round(needed, 2), round(available, 2)
    return check_text(
        "too_long",
        release,
        max_model_len=max_model_len,
        needed_gib=needed,
        available_gib=available,
        estimated_max_len=estimated_max_len,
        capacity=capacity,
    )
