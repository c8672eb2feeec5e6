"""Every process that came from one, by descent alone: never by name, and never a stranger that got a freed pid.

Only the standard library, and little of it: the keeper of a server lives as long as the server does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

_PROC = "/proc"
_EMPTY_LOOKS = 3
_PPID, _USER, _SYSTEM, _STARTED = 1, 11, 12, 19
"""Where the parent, both CPU times and the start time stand in /proc/PID/stat, counted after the name in brackets."""


def descendants(ancestor: int) -> dict[int, int]:
    """Pid -> start time of every living process below `ancestor`.

    An orphan belongs to the nearest subreaper above it (`adopt_orphans`), so below one nobody gets lost for long: while
    processes die, one look may miss what the next one sees. Zombies hold nothing, but may still have children.
    """
    parents: dict[int, tuple[int, int, bool]] = {}
    for name in _pids():
        if (fields := _stat(name)) is not None:
            parents[int(name)] = (int(fields[_PPID]), int(fields[_STARTED]), fields[0] not in "ZX")
    below: dict[int, tuple[int, bool]] = {}
    layer = {ancestor}
    while layer:
        layer = {pid for pid, (parent, _, _) in parents.items() if parent in layer and pid not in below}
        below |= {pid: parents[pid][1:] for pid in layer}
    return {pid: start for pid, (start, lives) in below.items() if lives}


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its pid, who it is. None where it is gone."""
    fields = _stat(str(pid))
    return int(fields[_STARTED]) if fields is not None and fields[0] != "Z" else None


def cpu_ticks(pid: int) -> int | None:
    """The CPU time that a process has used, in clock ticks; None where it is gone or a debugger holds it."""
    fields = _stat(str(pid))
    return int(fields[_USER]) + int(fields[_SYSTEM]) if fields is not None and fields[0] not in "Zt" else None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it (SIGSTOP); a debugger's hold is something else."""
    fields = _stat(str(pid))
    return fields is not None and fields[0] == "T"


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
    while empty < _EMPTY_LOOKS:
        empty = 0 if kill_below(ancestor, spare) else empty + 1
        reap()
        time.sleep(0.01)


def cleans_up(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes shared memory once those who used it are gone."""
    return b"multiprocessing.resource_tracker" in title(pid)


def title(pid: int) -> bytes:
    """What a process calls itself; nothing where it is gone."""
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
            return file.read(4096)
    except OSError:
        return b""


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


def _pids() -> list[str]:
    try:
        return [name for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208 - as above
    except OSError:
        return []


def _stat(name: str) -> list[str] | None:
    try:
        with open(f"{_PROC}/{name}/stat", "rb") as file:  # noqa: PTH123 - as above
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()


def _prctl(option: int, value: int) -> None:
    import ctypes  # noqa: PLC0415 - a megabyte that only Linux needs

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
