"""What the groups of a message pattern hold: the ending of a group's name tells its unit."""

from __future__ import annotations

import re
from collections.abc import Mapping

from legroom.units import GIB

Value = int | float | str
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d*)?")
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}  # fmt: skip


def typed(groups: Mapping[str, str]) -> dict[str, Value]:
    """Numbers with their units, by the ending of each group's name; one that does not read is left out."""
    values: dict[str, Value] = {}
    for name, text in groups.items():
        stem, _, unit = name.rpartition("_")
        try:
            if unit == "gib":
                values[f"{stem}_bytes"] = round(float(text) * GIB)
            elif unit == "size":
                values[f"{stem}_bytes"] = size_bytes(text)
            elif unit == "count":
                values[name] = int(text.replace(",", "")[:18])
            elif unit == "ratio":
                values[name] = float(text.rstrip("."))
            else:
                values[name] = text
        except (ValueError, OverflowError):
            continue
    return values


def size_bytes(text: str) -> int:
    """`1.96 GiB` in bytes."""
    number = _NUMBER.match(text.strip())
    if number is None:
        raise ValueError(text)
    unit = text.strip()[number.end() :].strip() or "bytes"
    if unit not in _UNITS:
        raise ValueError(text)
    return round(float(number[0].replace(",", "")) * _UNITS[unit])
