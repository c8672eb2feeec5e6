"""Where legroom keeps what it learns and sees."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$LEGROOM_HOME`, else `$XDG_DATA_HOME/legroom`, else `~/.local/share/legroom`."""
    given = os.environ.get("LEGROOM_HOME")
    if given:
        return Path(os.path.expanduser(given))  # noqa: PTH111 - a `~` of nobody stays as it is, and is no mistake
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else user_folder() / ".local" / "share") / "legroom"


def user_folder() -> Path:
    """The user's own. One whom the system does not know (a number given to a container) has `/`, as Docker has it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


_FILE = "calibration.json"


def store_path() -> Path:
    """In legroom's folder."""
    return home() / _FILE


def cards_path() -> Path:
    """What `legroom probe` measured of this user's cards."""
    return home() / "cards.json"


def runs_folder(folder: Path | None = None) -> Path:
    """Where every `legroom run` tells other programs of itself: `<port>.json`."""
    return (folder or home()) / "runs"
