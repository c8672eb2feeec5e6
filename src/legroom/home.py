"""Paths of legroom's own files."""

import os
from pathlib import Path

from legroom.files import expanded


def home() -> Path:
    """`$LEGROOM_HOME`, else `$XDG_DATA_HOME/legroom`, else `~/.local/share/legroom`."""
    given = os.environ.get("LEGROOM_HOME")
    if given:
        return expanded(given)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else user_folder() / ".local" / "share") / "legroom"


def user_folder() -> Path:
    """The user's home folder; `/` for a uid without a passwd entry, as in Docker."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def store_path() -> Path:
    """The calibration file: figures of the user's own start-ups."""
    return home() / "calibration.json"


def cards_path() -> Path:
    """The file of `legroom probe`'s measurements."""
    return home() / "cards.json"


def runs_folder(folder: Path | None = None) -> Path:
    """`runs` in `folder` (None: legroom's home), where every `legroom run` writes its state as `<port>.json`."""
    return (folder or home()) / "runs"
