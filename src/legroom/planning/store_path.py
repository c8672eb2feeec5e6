"""Where calibration is kept. Apart from the store itself, because every plan asks and few find anything."""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "calibration.json"


def store_path() -> Path:
    """`$LEGROOM_HOME`, else `$XDG_DATA_HOME/legroom`, else `~/.local/share/legroom`."""
    home = os.environ.get("LEGROOM_HOME")
    if home:
        return Path(home).expanduser() / _FILE
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "legroom" / _FILE


def runs_folder(home: Path | None = None) -> Path:
    """Where every `legroom run` tells other programs of itself: `<port>.json`."""
    return (home or store_path().parent) / "runs"
