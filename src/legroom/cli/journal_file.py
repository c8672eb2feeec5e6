"""Opening the journal to read it: a journal that nobody wrote is empty, not made."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.live.journal.journal import Journal


def open_journal(named: str | None) -> Journal | None:
    """The journal named, or the user's own; None where there is no own one yet."""
    from legroom.live.journal.journal import Journal, JournalUnavailable, journal_path

    path = Path(named) if named else journal_path()
    if not path.exists():
        if named:
            raise LegroomError(f"there is no journal {named}", "legroom watch and legroom run write one")
        return None
    try:
        return Journal.open(path)
    except JournalUnavailable:
        found = _read_only(path)
        if found is None:
            raise
        return found


def _read_only(path: Path) -> Journal | None:
    """The journal where nothing can be written: a full disk, a copy on a read-only one. None where it cannot be read.

    SQLite needs to write a file beside a journal even to read it. Where it cannot, the file is read as it stands,
    without what a writer that was killed left beside it.
    """
    import sqlite3

    from legroom.live.journal import schema
    from legroom.live.journal.journal import Journal

    for how in ("mode=ro", "mode=ro&immutable=1"):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, isolation_level=None)
        try:
            if schema.version_of(db) == schema.VERSION:
                return Journal(db, path, time.time)
        except sqlite3.Error as error:
            if "locked" in str(error):
                db.close()
                return None  # somebody writes: as it stands it may be half written
        db.close()
    return None
