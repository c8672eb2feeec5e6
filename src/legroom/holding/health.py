"""Is it up? One GET of /health over a bare socket, so that a supervisor needs no HTTP client."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

_PATIENCE_S = 2.0


def is_healthy(host: str, port: int, tls: bool = False, patience_s: float = _PATIENCE_S) -> bool:
    """Whether the server answers 200."""
    return health_status(host, port, tls, patience_s) == 200


def health_status(host: str, port: int, tls: bool = False, patience_s: float = _PATIENCE_S) -> int | None:
    """What the server answers; None where it does not."""
    try:
        with socket.create_connection((host, port), patience_s) as plain:
            plain.settimeout(patience_s)
            stream = _wrapped(plain, host) if tls else plain
            stream.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            return int(stream.recv(64).split(b" ")[1])
    except (OSError, ValueError, IndexError):
        return None


def _wrapped(plain: socket.socket, host: str) -> socket.socket:
    import ssl  # noqa: PLC0415 - megabytes that few need

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is our own child
    return context.wrap_socket(plain, server_hostname=host)


def port_problem(host: str, port: int) -> str:
    """Why a server could not listen there; empty where it could.

    vLLM itself binds with SO_REUSEPORT, so a second server on a port would start and take half of the requests.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use"
            return f"port {port} of {host} cannot be used: {error.strerror}"
    return f"port {port} is in use, by what does not listen yet" if _is_bound(family, host, port) else ""


def _is_bound(family: int, host: str, port: int) -> bool:
    """vLLM binds its port first and listens when it is up. Where no connection of the past holds the port, a plain bind
    tells."""
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE and not _has_connections(port)
    return False


def _has_connections(port: int) -> bool:
    """Whether the kernel still knows one; where that cannot be read, it may."""
    ending = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with Path(table).open(encoding="ascii") as lines:
                if any(line.split()[1].endswith(ending) for line in lines):
                    return True
        except FileNotFoundError:
            continue  # no IPv6
        except OSError:
            return True
    return False
