"""Who is at the other end of a socket of this machine.

vLLM's processes talk over ZeroMQ on Unix sockets (and over TCP between data-parallel ranks). /proc shows which sockets
a process holds and where a TCP connection leads, but not what a Unix socket is connected to: that answer comes from the
kernel's socket diagnostics (`man 7 sock_diag`), which need no privilege.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

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
    with socket.socket(family, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(2.0)
        body = _ASKED.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER, b"\0" * 8)
        asking.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        return dict(_answers(asking))


def _answers(asking: socket.socket) -> Iterator[tuple[int, int]]:
    while packet := asking.recv(1 << 17):
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
