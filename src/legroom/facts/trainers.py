"""Training frameworks that run vLLM, and where they set its share of the card. Data in `data/trainers.json`."""

from __future__ import annotations

from functools import cache

from legroom.facts.data_files import read_data


def trainer_setting(line: str) -> str | None:
    """The setting of the framework whose files a line of a traceback names; None where it names none."""
    text = line.lower()
    return next((setting for mark, setting in _trainers() if mark in text), None)


@cache
def _trainers() -> tuple[tuple[str, str], ...]:
    return tuple((entry["mark"], entry["setting"]) for entry in read_data("trainers.json")["trainers"])
