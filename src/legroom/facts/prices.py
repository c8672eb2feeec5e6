"""What an hour of a card costs at list price. Data in `data/prices.json`, a date and a source each."""

from __future__ import annotations

from functools import cache

from legroom.facts.data_files import read_data
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """Of one card, in US dollars."""

    gpu: str
    usd_per_hour: float
    date: str
    """When it was read, as 2026-08-22; empty for a price of the user's own that tells none."""
    source: str


@cache
def list_prices() -> dict[str, GpuPrice]:
    """By the name of the card in the facts."""
    return {entry["gpu"]: GpuPrice(**entry) for entry in read_data("prices.json")["prices"]}
