"""What holds memory on this machine: processes, their sockets and shared memory, and the GPUs as NVML sees them.

Only looks. Which of it is dead weight is decided by the rules in `dead_weight`, on what is gathered here.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.records import dataclass
from legroom.vllm_logs.log_masking import masked, plain

if TYPE_CHECKING:
    from legroom.live.gpu_memory import GpuMemory


ELSEWHERE = -1
"""The other end is on another machine, or in another network namespace."""

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP, _ERROR, _DONE = 0x301, 2, 3
_SHOW_PEER, _PEER = 0x04, 2
_ALL_STATES = 0xFFFFFFFF
_HEADER, _ASKED, _SAID, _ATTRIBUTE = (struct.Struct(form) for form in ("=IHHII", "=BBHIII8s", "=BBBBI8s", "=HH"))
_ESTABLISHED = "01"
_V4_IN_V6 = "0000000000000000FFFF0000"


def socket_peers() -> dict[int, int] | None:
    """The inode of every connected socket of this network namespace, and of its peer; None where that is not told."""
    try:
        return {**tcp_peers(_tcp_lines()), **_unix_peers()}
    except (OSError, struct.error):
        return None


def tcp_peers(lines: Iterable[str]) -> dict[int, int]:
    """Established TCP connections, from the lines of /proc/net/tcp and tcp6."""
    ends: dict[tuple[str, str], int] = {}
    for line in lines:
        words = line.split()
        if len(words) > 9 and words[3] == _ESTABLISHED and words[9].isdigit():
            ends[_address(words[1]), _address(words[2])] = int(words[9])
    return {inode: ends.get((there, here), ELSEWHERE) for (here, there), inode in ends.items()}


def _address(text: str) -> str:
    return text.removeprefix(_V4_IN_V6)


def _tcp_lines() -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        if path.exists():
            yield from path.read_text("ascii").splitlines()[1:]


def _unix_peers() -> dict[int, int]:
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise OSError("this system has no netlink")
    with socket.socket(family, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(2.0)
        body = _ASKED.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER, b"\0" * 8)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        return dict(_answers(netlink))


def _answers(netlink: socket.socket) -> Iterator[tuple[int, int]]:
    while packet := netlink.recv(1 << 17):
        at = 0
        while at + _HEADER.size <= len(packet):
            length, kind, _, _, _ = _HEADER.unpack_from(packet, at)
            if kind == _DONE or length < _HEADER.size:
                return
            if kind == _ERROR:
                raise OSError("the kernel does not tell the peers of sockets")
            pair = _pair(packet[at + _HEADER.size : at + length])
            if pair:
                yield pair
            at += -(-length // 4) * 4


def _pair(message: bytes) -> tuple[int, int] | None:
    inode = int(_SAID.unpack_from(message)[4])
    at = _SAID.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            return None
        if kind == _PEER:
            return inode, int(struct.unpack_from("=I", message, at + _ATTRIBUTE.size)[0])
        at += -(-length // 4) * 4
    return None


SHARED_MEMORY = Path("/dev/shm")
NO_NVML = "no NVIDIA driver answers here (NVML): what holds GPU memory cannot be read"
_PROC = Path("/proc")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel gives the machine's own process namespace this number always: in any other, some processes are hidden."""
_LONGEST_TITLE = 160


@dataclass(frozen=True)
class ProcessFact:
    """One process, as far as it may be read."""

    pid: int
    created_s: float
    parent: int
    name: str
    title: str
    """The command line, secrets masked."""
    is_python: bool
    status: str = "sleeping"
    user: str = ""
    resident_bytes: int = 0
    loads_vllm: bool = False
    """Code of vLLM is mapped into it."""
    peers: frozenset[int] = frozenset()
    """Processes at the other end of its connections."""
    has_unseen_peer: bool = False
    """Something is connected whose process cannot be seen."""
    shared: frozenset[str] = frozenset()
    """Files of /dev/shm that it has open or mapped."""
    is_readable: bool = True

    @property
    def identity(self) -> tuple[int, float]:
        """A PID is used again; together with the time of birth it is not."""
        return self.pid, self.created_s


@dataclass(frozen=True)
class SharedMemorySegment:
    """One file of /dev/shm."""

    path: str
    length: int
    bytes: int
    """Held in memory: pages that were never written to are not."""
    inode: int
    modified_s: float
    is_accounted: bool = True
    """Whether every process that may map it was read: it is private to its user, and we are that user or root."""
    owner: str = ""
    """Its user, where that is another one and we are not root."""


@dataclass(frozen=True)
class Holdings:
    """One look at the machine."""

    time_s: float
    processes: Mapping[int, ProcessFact]
    gpus: tuple[GpuMemory, ...] = ()
    segments: tuple[SharedMemorySegment, ...] = ()
    sees_every_process: bool = True
    """False in a container, where a process that maps a segment may be hidden."""
    knows_peers: bool = True
    notes: tuple[str, ...] = ()
    hides_others: bool = False
    """Whether the processes of other users are not listed at all (/proc mounted with hidepid)."""

    def tree(self, pid: int) -> tuple[ProcessFact, ...]:
        """A process and everything below it."""
        below: dict[int, list[ProcessFact]] = {}
        for fact in self.processes.values():
            below.setdefault(fact.parent, []).append(fact)
        tree = [self.processes[pid]] if pid in self.processes else []
        for fact in tree:
            tree += below.get(fact.pid, ())
        return tuple(tree)

    def gpu_bytes(self, pid: int) -> int:
        """What NVML says a process holds, on all GPUs together."""
        return sum(used or 0 for card in self.gpus for holder, used in card.processes if holder == pid)


def look(shared_memory: Path = SHARED_MEMORY) -> Holdings:
    """Gather everything once: hundredths of a second on a small machine, a second where thousands of processes run."""
    import psutil  # most commands never look

    if not (_PROC / "self/fd").exists():
        raise LegroomError(
            "what holds memory is read from /proc, which this system does not have", "vLLM runs on Linux"
        )
    peers = socket_peers()
    opened = {int(folder.name): _OpenFiles.of(folder) for folder in _PROC.iterdir() if folder.name.isdigit()}
    owners: dict[int, set[int]] = {}
    for pid, seen in opened.items():
        for inode in seen.sockets:
            owners.setdefault(inode, set()).add(pid)
    processes = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            seen = opened.get(process.pid, _OpenFiles())
            processes[process.pid] = _fact(psutil, process, seen, _ends(seen, process.pid, peers or {}, owners))
    gpus = _gpus()
    return Holdings(
        time_s=time.time(),
        processes=processes,
        gpus=gpus,
        segments=_segments(shared_memory),
        sees_every_process=_sees_every_process(opened),
        knows_peers=peers is not None,
        notes=() if gpus else (NO_NVML,),
        hides_others=os.getuid() != 0 and 1 not in processes,
    )


def born(pid: int) -> float | None:
    """When the process of this PID was born, in the terms of `ProcessFact.created_s`; None where there is none."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


@dataclass(frozen=True)
class _OpenFiles:
    sockets: tuple[int, ...] = ()
    shared: frozenset[str] = frozenset()
    loads_vllm: bool = False
    is_readable: bool = False
    is_in_our_network: bool = True

    @staticmethod
    def of(folder: Path) -> _OpenFiles:
        """The files, sockets and maps of a process; unreadable where we may not look."""
        try:
            targets = {entry.name: _link(entry.path) for entry in os.scandir(folder / "fd")}
            mapped = (folder / "maps").read_text("utf-8", "replace")
        except OSError:
            return _OpenFiles()
        if targets and not any(targets.values()):
            return _OpenFiles()  # the names of its files may be listed, but not what they are
        # Where output goes (journald's socket under systemd) says nothing about who uses the process.
        output = {targets.get(name, "") for name in ("0", "1", "2")}
        shared = {target for target in targets.values() if target.startswith("/dev/shm/")}
        shared |= {line[line.index("/dev/shm/") :] for line in mapped.splitlines() if "/dev/shm/" in line}
        return _OpenFiles(
            tuple(
                int(match[1]) for name in targets.values() if name not in output and (match := _SOCKET.fullmatch(name))
            ),
            frozenset(path.removesuffix(" (deleted)") for path in shared),
            "/vllm/" in mapped,
            True,
            _link(str(folder / "ns/net")) in ("", _link("/proc/self/ns/net")),
        )


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - thousands of times a look
    except OSError:
        return ""


def _ends(
    seen: _OpenFiles, pid: int, peers: Mapping[int, int], owners: Mapping[int, Iterable[int]]
) -> tuple[frozenset[int], bool]:
    """The processes at the other ends, and whether one of them cannot be seen."""
    talking: set[int] = set()
    unseen = not seen.is_in_our_network
    for inode in seen.sockets:
        peer = peers.get(inode, 0)
        if peer == ELSEWHERE:
            unseen = True
        elif peer:
            # The peer's inode is gone from the tables once its process is: then nobody holds it, and nobody talks.
            holders = owners.get(peer, ())
            talking.update(holders)
            unseen = unseen or (not holders and peer in peers)
    return frozenset(talking - {pid}), unseen


def _fact(psutil: Any, process: Any, seen: _OpenFiles, ends: tuple[frozenset[int], bool]) -> ProcessFact:
    with process.oneshot():
        name, status = plain(process.name()), process.status()
        title = "" if status == "zombie" else _title(psutil, process)
        return ProcessFact(
            pid=process.pid,
            created_s=process.create_time(),
            parent=process.ppid() or 0,
            name=name,
            title=title,
            is_python=_is_python(psutil, process, name, title),
            status=status,
            user=_user(psutil, process),
            resident_bytes=_resident(psutil, process),
            loads_vllm=seen.loads_vllm,
            peers=ends[0],
            has_unseen_peer=ends[1],
            shared=seen.shared,
            is_readable=seen.is_readable or status == "zombie",
        )


def _title(psutil: Any, process: Any) -> str:
    try:
        words = process.cmdline()
    except (psutil.Error, OSError):
        return ""
    return masked(" ".join(word.strip() for word in words if word.strip()))[:_LONGEST_TITLE]


def _user(psutil: Any, process: Any) -> str:
    try:
        return str(process.username())
    except (psutil.Error, OSError, KeyError):
        return ""


def _resident(psutil: Any, process: Any) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.Error, OSError):
        return 0


def _is_python(psutil: Any, process: Any, name: str, title: str) -> bool:
    try:
        program = Path(process.exe()).name
    except (psutil.Error, OSError):
        program = ""
    # Of somebody else's process only the name may be readable; a process that gave itself a title has lost even that.
    return (program or name).startswith(("python", "pypy", "vllm")) or (not program and "::" in (title or name))


def _gpus() -> tuple[GpuMemory, ...]:
    from legroom.live.gpu_memory import devices

    return devices()


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _segments(folder: Path) -> tuple[SharedMemorySegment, ...]:
    segments = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    seen = entry.stat(follow_symlinks=False)
                    ours = os.getuid() in (0, seen.st_uid) and not seen.st_mode & 0o077
                    segments.append(
                        SharedMemorySegment(
                            entry.path,
                            seen.st_size,
                            seen.st_blocks * 512,
                            seen.st_ino,
                            seen.st_mtime,
                            ours,
                            "" if os.getuid() in (0, seen.st_uid) else _user_name(seen.st_uid),
                        )
                    )
    return tuple(sorted(segments, key=lambda segment: segment.path))


def _sees_every_process(opened: Mapping[int, _OpenFiles]) -> bool:
    """Whether this is the machine's own view of processes, and all of ours could be read."""
    if _link("/proc/self/ns/pid") != _FIRST_PID_NAMESPACE:
        return False
    hidden = (_PROC / str(pid) for pid, seen in opened.items() if not seen.is_readable)
    return not any(_is_ours(folder) for folder in hidden)


def _is_ours(folder: Path) -> bool:
    """Whether a process that could not be read might map a segment of ours."""
    try:
        if folder.stat().st_uid != os.getuid() or (folder / "stat").read_text("utf-8", "replace").find(") Z") > 0:
            return False
        # The first process of a machine is its init; kernel threads (no program, no memory) map nothing either.
        return folder.name != "1" and (folder / "statm").read_text("ascii").split()[0] != "0"
    except OSError:
        return False
