"""What stood before a change of flags, kept in files of one's own until it is undone or no longer wanted.

Not in the journal: that masks secrets, and a command line that is put back must be whole.
"""

from __future__ import annotations

import json
from pathlib import Path

from legroom.actions.platform import ActionFailed, Override, read_if_there, write_whole
from legroom.planning.store_path import store_path


def undo_file(action_id: int, home: Path | None = None) -> Path:
    """Where the override of an action is kept."""
    return (home or store_path().parent) / "undo" / f"{action_id}.json"


def keep_override(action_id: int, override: Override, home: Path | None = None) -> None:
    """Keeps it, safely in the file before anything is changed."""
    held = {"place": override.place, "before": override.before}
    write_whole(undo_file(action_id, home), json.dumps(held) + "\n", 0o600)


def kept_override(action_id: int, home: Path | None = None) -> Override | None:
    """What was kept; None where nothing was, or it has been undone."""
    path = undo_file(action_id, home)
    text = read_if_there(path)
    if text is None:
        return None
    try:
        held = json.loads(text)
        return Override(str(held["place"]), held["before"])
    except (ValueError, KeyError, TypeError) as error:
        raise ActionFailed(f"{path} cannot be read: {error}") from error


def forget_override(action_id: int, home: Path | None = None) -> None:
    """It has been undone."""
    undo_file(action_id, home).unlink(missing_ok=True)
