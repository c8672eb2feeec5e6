"""One sidecar a journal."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from legroom.errors import LegroomError


@contextlib.contextmanager
def alone(journal: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the place of the one sidecar of a journal. The kernel lets go of the lock however the process ends."""
    path = journal.with_name(f"{journal.name}.sidecar")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        say(f"{path} cannot be made ({error.strerror}): nothing keeps a second sidecar away")
        yield
        return
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LegroomError(f"another legroom already watches with the journal {journal}") from error
        yield
    finally:
        os.close(held)
