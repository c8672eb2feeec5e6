"""Every process that came from one, by descent alone: never by name, and never a stranger that got a freed pid.

Only the standard library, and little of it: the keeper of a server lives as long as the server does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from legroom.process_table import descendants, started, title

_EMPTY_SCANS = 3


def send(pid: int, start: int, number: int) -> bool:
    """Send a signal to the process that `descendants` saw; False where it has gone, whoever has its pid now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if started(pid) != start:  # the handle is of whoever had the pid when it was opened
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def kill_below(ancestor: int, spare: Callable[[int], bool] | None = None) -> int:
    """SIGKILL everything below `ancestor` but what `spare` says; how many were there."""
    below = {pid: start for pid, start in descendants(ancestor).items() if spare is None or not spare(pid)}
    for pid, start in below.items():
        send(pid, start, signal.SIGKILL)
    return len(below)


def kill_all_below(ancestor: int, spare: Callable[[int], bool] | None = None) -> None:
    """The same until several looks in a row find nobody: what one look misses, the next one sees."""
    empty = 0
    while empty < _EMPTY_SCANS:
        empty = 0 if kill_below(ancestor, spare) else empty + 1
        reap()
        time.sleep(0.01)


def is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes shared memory once those who used it are gone."""
    return b"multiprocessing.resource_tracker" in title(pid)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (Linux; elsewhere nothing happens)."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that made it dies (Linux; elsewhere nothing happens)."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> wait status."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _prctl(option: int, value: int) -> None:
    import ctypes  # a megabyte that only Linux needs

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
