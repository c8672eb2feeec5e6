"""Opening the journal to read it: a journal that nobody wrote is empty, not made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.live.journal import Journal


def open_journal(named: str | None) -> Journal | None:
    """The journal named, or the user's own; None where there is no own one yet."""
    from legroom.live.journal import Journal, journal_path

    path = Path(named) if named else journal_path()
    if not path.exists():
        if named:
            raise LegroomError(f"there is no journal {named}", "legroom watch and legroom run write one")
        return None
    return Journal.open(path)
