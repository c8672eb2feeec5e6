"""Prices that the user owns: a TOML file with a table a card, `[h100]` and `usd_per_hour = 2.49`."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.gpus import GpuPrice
from legroom.facts.gpus import gpu as known_gpu

_EXAMPLE = "write it like: [h100] and, in the next line, usd_per_hour = 2.49"
_KEYS = ("usd_per_hour", "date", "source")


def read_price_file(path: str) -> dict[str, GpuPrice]:
    """By the name of the card in the facts; a card that is not in the file has no price."""
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise LegroomError(f"the prices in {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LegroomError(f"the prices in {path} cannot be read: it is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise LegroomError(f"{path} is not TOML: {error}", _EXAMPLE) from error
    prices: dict[str, GpuPrice] = {}
    for name, table in tables.items():
        price = _price(path, name, table)
        if price.gpu in prices:
            raise LegroomError(f"{path} gives two prices for the {price.gpu}", "leave one of them out")
        prices[price.gpu] = price
    if not prices:
        raise LegroomError(f"{path} gives no price", _EXAMPLE)
    return prices


def _price(path: str, name: str, table: Any) -> GpuPrice:
    try:
        card = known_gpu(name)
    except LegroomError as error:
        raise LegroomError(f"{path} has a price for {name!r}, and legroom knows no such GPU", error.hint) from error
    if not isinstance(table, dict):
        raise LegroomError(f"{path}: {name} is not a table", _EXAMPLE)
    if unknown := sorted(set(table) - set(_KEYS)):
        raise LegroomError(f"{path}, [{name}]: {unknown[0]!r} is not a key of a price", f"there are {', '.join(_KEYS)}")
    usd = table.get("usd_per_hour")
    if isinstance(usd, bool) or not isinstance(usd, int | float) or not (0 <= usd < math.inf):
        raise LegroomError(f"{path}, [{name}]: usd_per_hour must be a number of at least 0", _EXAMPLE)
    return GpuPrice(card.name, float(usd), str(table.get("date", "")), str(table.get("source", path)))
