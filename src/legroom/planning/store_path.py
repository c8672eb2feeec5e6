"""Where calibration is kept. Apart from the store itself, because every plan asks and few find anything."""

from __future__ import annotations

from pathlib import Path

from legroom.home import home as legroom_home

_FILE = "calibration.json"


def store_path() -> Path:
    """In legroom's folder."""
    return legroom_home() / _FILE


def runs_folder(home: Path | None = None) -> Path:
    """Where every `legroom run` tells other programs of itself: `<port>.json`."""
    return (home or legroom_home()) / "runs"
