"""A lock file that one process holds while it runs."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from legroom.errors import LegroomError


@contextlib.contextmanager
def single_process(
    path: Path, say: Callable[[str], None], what_is_kept_away: str, make_refusal: Callable[[str], LegroomError]
) -> Iterator[None]:
    """Context manager: holds the lock file at `path`, or raises `make_refusal(pid)` with the holder's pid. If there can
    be no lock, work goes on and `say` gets "nothing keeps `what_is_kept_away`" (such as "a second sidecar away")."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        say(f"{path} cannot be made ({error.strerror}): nothing keeps {what_is_kept_away}")
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        except BlockingIOError:
            raise make_refusal(os.read(lock, 32).decode("ascii", "replace").strip()) from None
        except OSError as error:
            say(f"{path} cannot be held ({error.strerror}): nothing keeps {what_is_kept_away}")
        yield
    finally:
        os.close(lock)
