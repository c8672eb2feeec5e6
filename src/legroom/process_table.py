"""Processes from /proc: parents, start times, states and titles; and vLLM's processes by their titles. Imports little
of the standard library: `legroom run` keeps it loaded, and the guard uses it inside vLLM. Releases of vLLM without
process titles have no recognizable processes."""

import os
import re
import struct

_PROC = "/proc"
_PPID, _USER, _SYSTEM, _STARTED, _RESIDENT, _EXIT_STATUS = 1, 11, 12, 19, 21, 49
"""Fields of /proc/PID/stat after the name in brackets: parent, user and system CPU time, start time, resident pages,
wait status."""

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT, _PIDFD_INFO = 0xC040FF0B, 1 << 3, struct.Struct("Q52xi")
"""The ioctl on a pidfd, the bit that asks for the wait status, and the mask and the status in its 64 bytes."""

ProcessTable = dict[int, tuple[int, int, bool]]
"""Pid -> parent, start time, whether it is alive: a zombie may still have children."""


def process_table() -> ProcessTable:
    """Pid -> (parent's pid, start ticks, whether it is alive and no zombie) of every process."""
    stats = ((int(name), _stat_fields(name)) for name in _all_pids())
    return {pid: (int(of[_PPID]), int(of[_STARTED]), of[0] not in "ZX") for pid, of in stats if of is not None}


def descendants(ancestor: int, table: ProcessTable | None = None) -> dict[int, int]:
    """Pid -> start time of every living descendant of `ancestor`."""
    # An orphan is reparented to the nearest subreaper (`adopt_orphans`); while processes exit, one table may miss some.
    parents = process_table() if table is None else table
    below: dict[int, tuple[int, bool]] = {}
    layer = {ancestor}
    while layer:
        layer = {pid for pid, (parent, _, _) in parents.items() if parent in layer and pid not in below}
        below |= {pid: parents[pid][1:] for pid in layer}
    return {pid: start for pid, (start, lives) in below.items() if lives}


def process_start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot, unique with its pid; None where it has ended."""
    fields = _stat_fields(str(pid))
    return int(fields[_STARTED]) if fields is not None and fields[0] != "Z" else None


def cpu_ticks(pid: int) -> int | None:
    """CPU time of a process in clock ticks; None where it has ended or a debugger has stopped it."""
    fields = _stat_fields(str(pid))
    return int(fields[_USER]) + int(fields[_SYSTEM]) if fields is not None and fields[0] not in "Zt" else None


def exit_signal(pid: int, pidfd: int) -> int | None:
    """The signal that ended a process; 0 if it exited by itself, None if it runs or the kernel no longer knows."""
    import fcntl  # an extension module

    fields = _stat_fields(str(pid))
    if fields is not None and fields[0] == "Z":
        return int(fields[_EXIT_STATUS]) & 0x7F
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:  # Linux 6.15 and later: once its parent has collected it
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    asked, status = _PIDFD_INFO.unpack(info)
    return int(status) & 0x7F if asked & _PIDFD_INFO_EXIT else None


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped the process; a stop by a debugger does not count."""
    fields = _stat_fields(str(pid))
    return fields is not None and fields[0] == "T"


def resident_bytes(pids: tuple[int, ...]) -> int | None:
    """Resident host memory of these processes together; None where none of them is left."""
    living = [fields for pid in pids if (fields := _stat_fields(str(pid))) is not None and fields[0] not in "ZX"]
    return sum(int(fields[_RESIDENT]) for fields in living) * os.sysconf("SC_PAGE_SIZE") if living else None


def process_title(pid: int) -> bytes:
    """The process title (/proc/PID/cmdline); empty where the process is gone."""
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
            return file.read(4096)
    except OSError:
        return b""


def _all_pids() -> list[str]:
    """The pids of all processes, as names of folders in /proc; empty without /proc."""
    try:
        return [name for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208 - as above
    except OSError:
        return []


def _stat_fields(pid: str) -> list[str] | None:
    """The fields of /proc/PID/stat after the command name; None where the process is gone."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:  # noqa: PTH123 - as above
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()


ENGINE_ROLES = ("EngineCore", "Worker", "DPCoordinator")
_SHARES_ENGINES = re.compile(rb"::APIServer_\d+[\s\0]*$")


def has_role(pid: int, *roles: str) -> bool:
    """Whether vLLM's title of the process names one of these roles; a single API server has no title."""
    title = process_title(pid)
    return any(f"::{role}".encode() in title for role in roles)


def engine_name(pid: int, server: int) -> str:
    """The title of an engine process of API server `server`; `an untitled process` before it has one; else empty."""
    if has_role(pid, *ENGINE_ROLES):
        return process_title(pid).strip(b"\0 ").decode("utf-8", "replace")
    title = process_title(pid)
    return "an untitled process" if title and (title == process_title(server) or b"spawn_main(" in title) else ""


def shares_engines(pid: int) -> bool:
    """Whether the process is one of several API servers of one vLLM, whose engines are its siblings."""
    return _SHARES_ENGINES.search(process_title(pid)) is not None


def engines_below(server: int, table: ProcessTable | None = None) -> dict[int, int]:
    """Pid -> start time of the descendants titled as engine, worker or coordinator; empty without titles."""
    return {pid: start for pid, start in descendants(server, table).items() if has_role(pid, *ENGINE_ROLES)}
