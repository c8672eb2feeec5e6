"""Memory limits, peaks and out-of-memory kills of a process's cgroup and of the machine. Reads files of /proc and /sys,
for both versions of cgroups. What cannot be read is None."""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from legroom.facts import pattern as reading_pattern
from legroom.records import dataclass

_UNLIMITED = 1 << 60  # Version 1 writes "no limit" as a number near 2^63.
_KILLED = reading_pattern("kernel_memory.killed")


class _CgroupFiles(NamedTuple):
    events: str
    limit: str
    peak: str
    current: str


_FILES = {
    1: _CgroupFiles(
        "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.usage_in_bytes"
    ),
    2: _CgroupFiles("memory.events", "memory.max", "memory.peak", "memory.current"),
}


@dataclass(frozen=True)
class Cgroup:
    folder: str
    mount: str
    version: int

    @classmethod
    def of(cls, pid: int | str = "self", proc: Path = Path("/proc")) -> "Cgroup | None":
        """The memory cgroup of a process; None where it has none, or it is not visible here."""
        paths = _cgroup_paths(_text_or_empty(proc / str(pid) / "cgroup"))
        for mount, root, version in _cgroup_mounts(_text_or_empty(proc / "self/mountinfo")):
            path = paths.get(version)
            if path is None:
                continue
            folder = Path(mount, os.path.relpath(path, root) if path.startswith(root) else path.lstrip("/"))
            if folder.joinpath(_FILES[version].current).exists():
                return cls(str(folder), mount, version)
        return None

    @property
    def kills(self) -> int | None:
        """Processes of the cgroup that the kernel's OOM killer has ended; None where the file is not readable."""
        return _parse_counters(_text_or_empty(Path(self.folder) / _FILES[self.version].events)).get("oom_kill")

    @property
    def limit(self) -> tuple[int, str] | None:
        """(bytes, folder) of the lowest limit among this cgroup and its parents; None without one."""
        own = Path(self.folder)
        folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(self.mount)]
        limits = ((_parse_int(_text_or_empty(folder / _FILES[self.version].limit)), folder) for folder in folders)
        return min(((limit, str(at)) for limit, at in limits if limit is not None and limit < _UNLIMITED), default=None)

    def peak_bytes(self, folder: str) -> int | None:
        """The peak memory use of a cgroup's folder; None in version 2 before Linux 5.19."""
        return _parse_int(_text_or_empty(Path(folder) / _FILES[self.version].peak))


@dataclass(frozen=True)
class KernelAccount:
    """Counters of out-of-memory kills at one time, to be compared with later ones."""

    cgroup: Cgroup | None
    kills: int | None
    machine_kills: int | None
    time_s: float
    """Seconds since boot, as in the kernel's log."""

    @classmethod
    def of(cls, pid: int | str = "self", proc: Path = Path("/proc")) -> "KernelAccount":
        """The kernel's out-of-memory account now: the process's cgroup, and kills so far in it and on the machine."""
        cgroup = Cgroup.of(pid, proc)
        return cls(cgroup, cgroup.kills if cgroup else None, machine_kills(proc), time.clock_gettime(_KERNEL_CLOCK))


_KERNEL_CLOCK = getattr(time, "CLOCK_MONOTONIC", 1)  # The clock of the kernel's log, which drifts by seconds a day.


@dataclass(frozen=True)
class KernelKill:
    """A process that the kernel's out-of-memory killer ended."""

    limit_bytes: int | None
    """The cgroup's limit where it was the reason; None: the machine ran out of memory."""
    limit_file: str
    """The file that sets the limit."""
    peak_bytes: int | None
    machine_bytes: int | None
    victim: str = ""
    victim_bytes: int | None = None
    """The victim's resident memory, from the kernel's log."""
    line: str = ""
    """The line of the kernel's log."""


def kernel_kill(before: KernelAccount, proc: Path = Path("/proc"), kmsg: Path = Path("/dev/kmsg")) -> KernelKill | None:
    """The kernel's out-of-memory kill since `before`; None where the kill counters did not increase."""
    # Without a cgroup the machine's counter is used, which includes processes of others.
    cgroup = before.cgroup
    now = cgroup.kills if cgroup is not None else machine_kills(proc)
    then = before.kills if cgroup is not None else before.machine_kills
    if now is None or then is None or now <= then:
        return None
    records = [text for stamp_s, text in _kernel_log(kmsg) if stamp_s >= before.time_s - 5.0 and _KILLED.search(text)]
    line = records[-1] if records else ""
    memory = re.search(r"^MemTotal:\s+(\d+) kB", _text_or_empty(proc / "meminfo"), re.MULTILINE)
    killed = _KILLED.search(line)
    limit = cgroup.limit if cgroup is not None else None
    peak = cgroup.peak_bytes(limit[1]) if cgroup is not None and limit is not None else None
    # A cgroup at 90 % of its limit was full: the kernel reclaims file pages first.
    in_cgroup = "cgroup" in killed["scope"] if killed else peak is None or (limit and peak >= 0.9 * limit[0])
    if cgroup is None or limit is None or not in_cgroup:
        limit = peak = None
    victim, victim_bytes = (killed["name"], int(killed["anon"]) * 1024) if killed else ("", None)
    limit_bytes = limit[0] if limit else None
    file = str(Path(limit[1]) / _FILES[cgroup.version].limit) if cgroup is not None and limit else ""
    machine_bytes = int(memory[1]) * 1024 if memory else None
    return KernelKill(limit_bytes, file, peak, machine_bytes, victim, victim_bytes, line)


def machine_kills(proc: Path = Path("/proc")) -> int | None:
    """Out-of-memory kills since boot, of any process; None before Linux 4.13 or where not readable."""
    return _parse_counters(_text_or_empty(proc / "vmstat")).get("oom_kill")


def _kernel_log(kmsg: Path) -> Iterator[tuple[float, str]]:
    """(seconds since boot, text) of each record in /dev/kmsg: `priority,sequence,microseconds,flags;text`."""
    try:
        device = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(device, 8192)
            except BrokenPipeError:
                continue  # records were overwritten while they were read
            if not record:
                return
            head, _, text = record.decode("utf-8", "replace").partition(";")
            with contextlib.suppress(ValueError, IndexError):
                yield int(head.split(",")[2]) / 1e6, text.partition("\n")[0]
    except OSError:
        return  # BlockingIOError: no more records
    finally:
        os.close(device)


def _cgroup_paths(text: str) -> dict[int, str]:
    """Cgroup version (1, 2) -> path of the memory controller's cgroup, from the text of /proc/PID/cgroup."""
    paths: dict[int, str] = {}
    for line in text.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _cgroup_mounts(text: str) -> Iterator[tuple[str, str, int]]:
    """(Mount point, mounted root, version) of each cgroup mount, version 1 first, which accounts where both exist."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            mounts.append((fields[4], fields[3], 2))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts.append((fields[4], fields[3], 1))
    yield from sorted(mounts, key=lambda mount: mount[2])


def _parse_counters(text: str) -> Mapping[str, int]:
    """The counters in lines of `name number`, as in memory.events or /proc/vmstat; other lines are skipped."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _parse_int(text: str) -> int | None:
    """The number a text holds; None where it is anything but digits, such as `max`."""
    stripped = text.strip()
    return int(stripped) if stripped.isdecimal() else None


def _text_or_empty(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
