"""The kernel's table of processes: who is below whom, when it began, whether it runs, and what it calls itself.

Only the standard library, and little of it: the keeper of a server lives as long as the server does, and the guard
reads it inside of vLLM.
"""

from __future__ import annotations

import os
import re

_PROC = "/proc"
_PPID, _USER, _SYSTEM, _STARTED, _RESIDENT = 1, 11, 12, 19, 21
"""Where the parent, both CPU times, the start time and the resident pages stand in /proc/PID/stat, counted after the
name in brackets."""


ProcessTable = dict[int, tuple[int, int, bool]]
"""Pid -> parent, start time, whether it lives: zombies hold nothing, but may still have children."""


def process_table() -> ProcessTable:
    """Every process at this moment."""
    table: ProcessTable = {}
    for name in _pids():
        if (fields := _stat(name)) is not None:
            table[int(name)] = (int(fields[_PPID]), int(fields[_STARTED]), fields[0] not in "ZX")
    return table


def descendants(ancestor: int, table: ProcessTable | None = None) -> dict[int, int]:
    """Pid -> start time of every living process below `ancestor`, by a table of now or of a moment ago.

    An orphan belongs to the nearest subreaper above it (`adopt_orphans`), so below one nobody gets lost for long: while
    processes die, one look may miss what the next one sees.
    """
    parents = process_table() if table is None else table
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


def resident_bytes(pids: tuple[int, ...]) -> int | None:
    """What these processes hold of the host's memory; None where none is left."""
    living = [fields for pid in pids if (fields := _stat(str(pid))) is not None and fields[0] not in "ZX"]
    return sum(int(fields[_RESIDENT]) for fields in living) * os.sysconf("SC_PAGE_SIZE") if living else None


def title(pid: int) -> bytes:
    """What a process calls itself; nothing where it is gone."""
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - pathlib is not loaded here
            return file.read(4096)
    except OSError:
        return b""


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


_ENGINE = re.compile(rb"::(EngineCore|Worker|DPCoordinator)")
_ENGINE_CORE = re.compile(rb"::EngineCore")
_COORDINATOR = re.compile(rb"::DPCoordinator")
_API_SERVER = re.compile(rb"::APIServer")
_SHARES_ENGINES = re.compile(rb"::APIServer_\d+[\s\0]*$")


def is_engine(pid: int) -> bool:
    """Whether it works behind the API servers: an engine core, a worker, or the coordinator of data parallelism."""
    return _ENGINE.search(title(pid)) is not None


def is_engine_core(pid: int) -> bool:
    return _ENGINE_CORE.search(title(pid)) is not None


def is_coordinator(pid: int) -> bool:
    """Of data parallelism."""
    return _COORDINATOR.search(title(pid)) is not None


def is_api_server(pid: int) -> bool:
    """Whether it is one of several; a single one is the server itself, and has no title."""
    return _API_SERVER.search(title(pid)) is not None


def shares_engines(pid: int) -> bool:
    """Whether it is one of several API servers before the same engines, which are then beside it and not below."""
    return _SHARES_ENGINES.search(title(pid)) is not None


def engines_below(server: int, table: ProcessTable | None = None) -> dict[int, int]:
    """Pid -> start time of the engines of a server."""
    return {pid: start for pid, start in descendants(server, table).items() if is_engine(pid)}
