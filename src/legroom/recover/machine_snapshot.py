"""Reads what holds memory on this machine: processes, their sockets, shared memory, and the GPUs as NVML reports them.
Changes nothing. `orphans` decides which holders belong to a dead server."""

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
from legroom.vllm_logs.log_masking import masked_log_text, without_surrogates

if TYPE_CHECKING:
    from legroom.live.gpu_memory import GpuMemory

ELSEWHERE = -1
"""Stands for a peer on another machine or in another network namespace."""

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP, _ERROR, _DONE = 0x301, 2, 3
_SHOW_PEER, _PEER = 0x04, 2
_ALL_STATES = 0xFFFFFFFF
_HEADER, _UNIX_REQUEST = struct.Struct("=IHHII"), struct.Struct("=BBHIII8s")
_UNIX_MESSAGE, _ATTRIBUTE = struct.Struct("=BBBBI8s"), struct.Struct("=HH")
_ESTABLISHED = "01"
_V4_IN_V6 = "0000000000000000FFFF0000"


def socket_peers() -> dict[int, int] | None:
    """Socket inode -> inode of the other end, for every connection in this network namespace; None if unreadable."""
    try:
        tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
        lines = (line for table in tables for line in table.read_text("ascii").splitlines()[1:])
        return {**tcp_peers(lines), **_unix_socket_peers()}
    except (OSError, struct.error):
        return None


def tcp_peers(lines: Iterable[str]) -> dict[int, int]:
    """Socket inode -> inode of the other end, or ELSEWHERE if not local, from lines of /proc/net/tcp and tcp6."""
    ends: dict[tuple[str, str], int] = {}
    for line in lines:
        words = line.split()
        if len(words) > 9 and words[3] == _ESTABLISHED and words[9].isdigit():
            here, there = (address.removeprefix(_V4_IN_V6) for address in words[1:3])
            ends[here, there] = int(words[9])
    return {inode: ends.get((there, here), ELSEWHERE) for (here, there), inode in ends.items()}


def _unix_socket_peers() -> dict[int, int]:
    """Unix socket inode -> inode of the other end, as the kernel says by netlink; OSError where it refuses."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise OSError("this system has no netlink")
    with socket.socket(family, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(2.0)
        body = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER, b"\0" * 8)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        return dict(_unix_socket_pairs(netlink))


def _unix_socket_pairs(netlink: socket.socket) -> Iterator[tuple[int, int]]:
    """(Inode, inode of the other end) of each Unix socket in the netlink reply; OSError where the kernel refuses."""
    while packet := netlink.recv(1 << 17):
        at = 0
        while at + _HEADER.size <= len(packet):
            length, kind, _, _, _ = _HEADER.unpack_from(packet, at)
            if kind == _DONE or length < _HEADER.size:
                return
            if kind == _ERROR:
                raise OSError("the kernel does not tell the peers of sockets")
            pair = _socket_and_peer(packet[at + _HEADER.size : at + length])
            if pair:
                yield pair
            at += -(-length // 4) * 4


def _socket_and_peer(message: bytes) -> tuple[int, int] | None:
    """(Inode, inode of the other end) of the Unix socket in a sock_diag message; None if it is not connected."""
    inode = int(_UNIX_MESSAGE.unpack_from(message)[4])
    at = _UNIX_MESSAGE.size
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
_ATTRIBUTES = ("pid", "create_time", "ppid", "name", "status", "cmdline", "exe", "username", "memory_info")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The inode of the initial PID namespace, fixed in the kernel; other namespaces hide processes."""


@dataclass(frozen=True)
class ProcessInfo:
    """One process, as far as its /proc entry is readable."""

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
    """Whether files of vLLM are mapped into it."""
    peers: frozenset[int] = frozenset()
    """PIDs at the other end of its connections."""
    has_unseen_peer: bool = False
    """Whether a connection leads to a process that is not visible."""
    shared: frozenset[str] = frozenset()
    """Files of /dev/shm that it has open or mapped."""
    is_readable: bool = True

    @property
    def identity(self) -> tuple[int, float]:
        """(PID, creation time in Unix seconds), which together no later process has."""
        return self.pid, self.created_s


@dataclass(frozen=True)
class SharedMemorySegment:
    """One file of /dev/shm."""

    path: str
    length: int
    bytes: int
    """Memory in use, without pages that were never written."""
    inode: int
    modified_s: float
    is_accounted: bool = True
    """Whether every process that may map it was readable: it is private to our user, or we are root."""
    owner: str = ""
    """Its user, if that is another user and we are not root."""


@dataclass(frozen=True)
class MachineSnapshot:
    time_s: float
    processes: Mapping[int, ProcessInfo]
    gpus: tuple[GpuMemory, ...] = ()
    segments: tuple[SharedMemorySegment, ...] = ()
    sees_every_process: bool = True
    """False in a container, which hides processes that may map a segment."""
    knows_peers: bool = True
    notes: tuple[str, ...] = ()
    hides_others: bool = False
    """Whether processes of other users are hidden (/proc mounted with hidepid)."""

    def tree(self, pid: int) -> tuple[ProcessInfo, ...]:
        """The process, then all its descendants; empty where the process is unknown."""
        below: dict[int, list[ProcessInfo]] = {}
        for fact in self.processes.values():
            below.setdefault(fact.parent, []).append(fact)
        tree = [self.processes[pid]] if pid in self.processes else []
        for fact in tree:
            tree += below.get(fact.pid, ())
        return tuple(tree)

    def gpu_bytes(self, pid: int) -> int:
        """Bytes that the process holds on all GPUs together, by NVML."""
        return sum(used or 0 for card in self.gpus for holder, used in card.processes if holder == pid)


def read_machine(shared_memory: Path = SHARED_MEMORY) -> MachineSnapshot:
    """One snapshot of the machine, within a second for thousands of processes; LegroomError without /proc."""
    import psutil

    if not (_PROC / "self/fd").exists():
        why = "what holds memory is read from /proc, which this system does not have"
        raise LegroomError(why, "vLLM runs on Linux")
    peers = socket_peers()
    opened = {int(folder.name): _OpenFiles.of_process(folder) for folder in _PROC.iterdir() if folder.name.isdigit()}
    owners: dict[int, set[int]] = {}
    for pid, seen in opened.items():
        for inode in seen.sockets:
            owners.setdefault(inode, set()).add(pid)
    processes = {}
    for process in psutil.process_iter(_ATTRIBUTES, ad_value=""):
        files = opened.get(process.pid, _OpenFiles())
        processes[process.pid] = _process_info(process.info, files, _peer_pids(files, process.pid, peers or {}, owners))
    from legroom.live.gpu_memory import nvml_devices

    gpus = nvml_devices()
    return MachineSnapshot(
        time_s=time.time(),
        processes=processes,
        gpus=gpus,
        segments=_shared_memory_segments(shared_memory),
        sees_every_process=_sees_every_process(opened),
        knows_peers=peers is not None,
        notes=() if gpus else (NO_NVML,),
        hides_others=os.getuid() != 0 and 1 not in processes,
    )


def creation_time(pid: int) -> float | None:
    """When a process was created, in Unix seconds as in `ProcessInfo.created_s`; None if it does not exist."""
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
    def of_process(folder: Path) -> _OpenFiles:
        """The sockets and mapped files of the process with this /proc folder."""
        try:
            targets = {entry.name: link_target_or_empty(entry.path) for entry in os.scandir(folder / "fd")}
            mapped = (folder / "maps").read_text("utf-8", "replace")
        except OSError:
            return _OpenFiles()
        if targets and not any(targets.values()):
            return _OpenFiles()  # its descriptors are listed, but their targets are hidden
        # Standard streams (journald's socket under systemd) are no use of the process by others.
        output = {targets.get(name, "") for name in ("0", "1", "2")}
        shared = {target for target in targets.values() if target.startswith("/dev/shm/")}
        shared |= {line[line.index("/dev/shm/") :] for line in mapped.splitlines() if "/dev/shm/" in line}
        matches = (_SOCKET.fullmatch(name) for name in targets.values() if name not in output)
        sockets = tuple(int(match[1]) for match in matches if match)
        files = frozenset(path.removesuffix(" (deleted)") for path in shared)
        in_our_network = link_target_or_empty(str(folder / "ns/net")) in ("", link_target_or_empty("/proc/self/ns/net"))
        return _OpenFiles(sockets, files, "/vllm/" in mapped, True, in_our_network)


def link_target_or_empty(path: str) -> str:
    """Where a symbolic link leads; empty where it cannot be read."""
    try:
        return os.readlink(path)  # noqa: PTH115 - faster, and called thousands of times
    except OSError:
        return ""


def _peer_pids(
    files: _OpenFiles, pid: int, peers: Mapping[int, int], owners: Mapping[int, Iterable[int]]
) -> tuple[frozenset[int], bool]:
    """(PIDs of the processes connected to this one, whether any other end is out of sight), by `peers` (socket inode ->
    inode of the other end) and `owners` (socket inode -> PIDs)."""
    connected: set[int] = set()
    unseen = not files.is_in_our_network
    for inode in files.sockets:
        peer = peers.get(inode, 0)
        if peer == ELSEWHERE:
            unseen = True
        elif peer:
            # After the peer's process has ended, its inode is in no table, and nothing is connected.
            holders = owners.get(peer, ())
            connected.update(holders)
            unseen = unseen or (not holders and peer in peers)
    return frozenset(connected - {pid}), unseen


def _process_info(info: Mapping[str, Any], files: _OpenFiles, peers: tuple[frozenset[int], bool]) -> ProcessInfo:
    """The process of psutil's attributes (`info`; unreadable ones are None), with files and connected processes."""
    name, is_zombie = without_surrogates(info["name"]), info["status"] == "zombie"
    words = [] if is_zombie else [word.strip() for word in info["cmdline"] or () if word.strip()]
    title = masked_log_text(" ".join(words))[:160]
    program = Path(info["exe"] or "").name
    return ProcessInfo(
        pid=info["pid"],
        created_s=info["create_time"],
        parent=info["ppid"] or 0,
        name=name,
        title=title,
        # Of another user's process only the name is readable, or the title it gave itself.
        is_python=(program or name).startswith(("python", "pypy", "vllm")) or (not program and "::" in (title or name)),
        status=info["status"],
        user=info["username"],
        resident_bytes=info["memory_info"].rss if info["memory_info"] else 0,
        loads_vllm=files.loads_vllm,
        peers=peers[0],
        has_unseen_peer=peers[1],
        shared=files.shared,
        is_readable=files.is_readable or is_zombie,
    )


def _user_name(uid: int) -> str:
    """The login name of a user id; `user 1000` where it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _shared_memory_segments(folder: Path) -> tuple[SharedMemorySegment, ...]:
    """The files in a folder such as /dev/shm as segments, sorted by path; without unreadable ones."""
    segments = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    seen = entry.stat(follow_symlinks=False)
                    may_read = os.getuid() in (0, seen.st_uid)
                    ours, owner = may_read and not seen.st_mode & 0o077, "" if may_read else _user_name(seen.st_uid)
                    size, inode, modified_s = seen.st_blocks * 512, seen.st_ino, seen.st_mtime
                    made = SharedMemorySegment(entry.path, seen.st_size, size, inode, modified_s, ours, owner)
                    segments.append(made)
    return tuple(sorted(segments, key=lambda segment: segment.path))


def _sees_every_process(opened: Mapping[int, _OpenFiles]) -> bool:
    """Whether this is the initial PID namespace, and no unreadable process of our user may map a segment."""
    if link_target_or_empty("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE:
        return False
    hidden = (_PROC / str(pid) for pid, seen in opened.items() if not seen.is_readable)
    return not any(_may_map_segments(folder) for folder in hidden)


def _may_map_segments(folder: Path) -> bool:
    """Whether a process of our user, whose /proc maps are unreadable, is alive and may map a segment in /dev/shm."""
    try:
        if folder.stat().st_uid != os.getuid() or (folder / "stat").read_text("utf-8", "replace").find(") Z") > 0:
            return False
        # Neither init nor kernel threads (no memory) map segments.
        return folder.name != "1" and (folder / "statm").read_text("ascii").split()[0] != "0"
    except OSError:
        return False
