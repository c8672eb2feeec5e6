"""Bytes on the wire: what of a request goes on to the server, and of an answer back to the client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import re
import struct
import termios
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

from legroom.errors import LegroomError
from legroom.records import dataclass

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that speak of one connection alone."""
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
WITHOUT_BODY = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Upstream:
    host: str
    port: int
    tls: bool
    base_path: str
    authorization: bytes | None
    """From user and password in the address; a client's own header goes before it."""
    shown: str
    """The address as it may be printed."""

    @property
    def host_header(self) -> bytes:
        """What the server is called in requests."""
        usual = 443 if self.tls else 80
        name = f"[{self.host}]" if ":" in self.host else self.host
        return (name if self.port == usual else f"{name}:{self.port}").encode()

    @property
    def url(self) -> str:
        """The address without its secrets, for further requests."""
        return f"{'https' if self.tls else 'http'}://{self.host_header.decode()}{self.base_path}"


def upstream_of(url: str) -> Upstream:
    """Read the address that the user gave."""
    hint = "write it like http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise LegroomError(f"--upstream is not an address: {error}", hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", parts.hostname):
        raise LegroomError(
            f"--upstream needs an http or https address, not {parts.scheme}://{parts.hostname or ''}", hint
        )
    if "://" not in url and port is None:
        # A name alone, which is a mistyped word as often as a host: nobody would see that until the first request.
        raise LegroomError(f"--upstream {parts.hostname} has neither http:// nor a port, so it is not an address", hint)
    if port == 0:
        raise LegroomError("--upstream names port 0, where nothing can listen", hint)
    tls = parts.scheme == "https"
    secret = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        secret = b"Basic " + base64.b64encode(pair.encode())
    base = parts.path.rstrip("/")
    if base.endswith("/v1"):  # clients' own paths start with it
        base = base[:-3]
    number = port or (443 if tls else 80)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = f"{parts.scheme}://{'***@' if secret else ''}{name}:{number}{base}"
    return Upstream(parts.hostname, number, tls, base, secret, shown)


_HERE = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("0.0.0.0", "::", "")


def is_itself(upstream: Upstream, host: str, port: int) -> bool:
    """Whether requests sent there would come back to who listens on `host` and `port`."""
    here = upstream.host in _HERE and host in (*_HERE, *_EVERYWHERE)
    return upstream.port == port and (here or upstream.host == host)


def request_head(
    method: bytes,
    target: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    upstream: Upstream,
    length: int | None,
    peer: str,
) -> bytes:
    """The head of a request as the server gets it. `length` None: there is no body."""
    lines = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (method, upstream.base_path.encode(), target, upstream.host_header)]
    dropped = named_by_connection(headers)
    authorized = False
    forwarded = peer.encode()
    for name, value in headers:
        if name in HOP_BY_HOP or name in _REPLACED or name in dropped:
            continue
        if name == b"x-forwarded-for":
            forwarded = b"%b, %b" % (value, forwarded)
            continue
        authorized = authorized or name == b"authorization"
        lines.append(b"%b: %b\r\n" % (name, value))
    if forwarded:
        lines.append(b"x-forwarded-for: %b\r\n" % forwarded)
    if upstream.authorization is not None and not authorized:
        lines.append(b"authorization: %b\r\n" % upstream.authorization)
    if length is not None:
        lines.append(b"content-length: %d\r\n" % length)
    lines.append(b"\r\n")
    return b"".join(lines)


_REPLACED = frozenset({b"host", b"content-length", b"expect"})


def named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Further headers that a Connection header declares to be of this connection alone."""
    named: list[bytes] = []
    for name, value in headers:
        if name == b"connection":
            named += [word.strip().lower() for word in value.split(b",")]
    # These two words say what becomes of the connection; they name no header.
    return frozenset(named) - {b"close", b"keep-alive", b""}


def response_head(status: int, reason: bytes, headers: Headers, *, chunked: bool, keep_alive: bool) -> bytes:
    """The head of an answer as the client gets it."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason or REASONS.get(status, b""))]
    dropped = named_by_connection(headers)
    lines += [b"%b: %b\r\n" % pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] not in dropped]
    if chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def chunk(data: bytes) -> bytes:
    """One piece of an answer without a length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What the other side has yet to take, here and in the system, which asks for more only by the megabyte."""
    queued = bytes(4)
    with contextlib.suppress(OSError, ValueError):  # a system that cannot say it, a socket that is closed
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + int(struct.unpack("i", queued)[0])


def origin_form(target: bytes) -> bytes:
    """The target as origin servers want it: without scheme, host and fragment. It is what is read and what is sent."""
    target = target.partition(b"#")[0]
    if target.startswith(b"/") or target == b"*":
        return target
    after = target.partition(b"://")[2]
    starts = [at for at in (after.find(b"/"), after.find(b"?")) if at >= 0]
    rest = after[min(starts) :] if starts else b""
    return rest if rest.startswith(b"/") else b"/" + rest


def path_of(target: bytes) -> str:
    """The path of a target in origin form, decoded as servers do before they route it."""
    path = target.partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path
