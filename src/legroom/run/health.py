"""Is it up? One GET of /health over a bare socket, so that a supervisor needs no HTTP client."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path

from legroom.actions.child import Child
from legroom.process_table import cpu_ticks, descendants, engines_below, is_engine, is_stopped
from legroom.records import dataclass

HANG_CHECKS = 4
"""How many looks in a row must find it hanging."""
_HANG_TIMEOUT_S = 5.0
"""How long a look waits for an answer, at most."""


class HangWatch:
    """Neither work nor an answer, look after look: then it hangs.

    The event loop of an API server wakes up ten times a second (uvicorn), so one that lives uses CPU time even while
    nobody asks it anything, and a busy one uses much: neither is ever asked, and neither can be taken for one that
    hangs. Only a server that has used none since the last look is asked whether it answers.

    An engine that was stopped (SIGSTOP, a frozen job) serves nobody, however well its API server answers: it counts as
    silent, before a request finds out.
    """

    def __init__(
        self,
        timeout_s: float,
        used: Callable[[], int | None],
        answers: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._interval_s = timeout_s / HANG_CHECKS
        self._cpu_ticks, self._answers, self._clock = used, answers, clock
        self._is_stopped = is_stopped
        self._last_ticks = used()
        self._silent = 0
        self._due_s = clock() + self._interval_s

    def left_s(self) -> float | None:
        """How long until the next look; None where there is none."""
        return max(self._due_s - self._clock(), 0.0) if self._interval_s else None

    def is_hung(self) -> bool:
        """Look, if it is time to; whether it has hung for as long as the patience lasts."""
        if self.left_s() != 0.0:
            return False
        self._due_s = self._clock() + self._interval_s
        used = self._cpu_ticks()
        works = used is None or used != self._last_ticks
        self._last_ticks = used
        serves = (works or self._answers(min(_HANG_TIMEOUT_S, self._interval_s))) and not self._is_stopped()
        self._silent = 0 if serves else self._silent + 1
        return self._silent >= HANG_CHECKS


def api_server_cpu_ticks(child: Child) -> Callable[[], int | None]:
    """The CPU time of everything of a server but its engines, which may wait in a loop: of its API servers, and of what
    stands above them (`uv run`, `sudo`). None where one has gone, is debugged, or may be kept from printing."""
    server = child.pid
    assert server is not None

    def used() -> int | None:
        front = [pid for pid in (server, *descendants(server)) if not is_engine(pid)]
        ticks = [cpu_ticks(pid) for pid in front]
        if child.is_blocked or None in ticks:
            return None
        return sum(used or 0 for used in ticks) or None  # a system that counts no CPU time cannot tell work from none

    return used


def has_stopped_engine(child: Child) -> Callable[[], bool]:
    """Whether one of its engines does not run, because somebody stopped it; one under a debugger counts as running."""
    server = child.pid
    assert server is not None
    return lambda: any(is_stopped(pid) for pid in engines_below(server))


_HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ServerAddress:
    """Where the server listens, and whether it does."""

    host: str
    port: int
    tls: bool = False

    def is_healthy(self) -> bool:
        """Whether the server answers 200."""
        return self._health_status(_HEALTH_TIMEOUT_S) == 200

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers at all."""
        return self._health_status(timeout_s) is not None

    def _health_status(self, timeout_s: float) -> int | None:
        try:
            with socket.create_connection((self.host, self.port), timeout_s) as plain:
                plain.settimeout(timeout_s)
                stream = _wrapped(plain, self.host) if self.tls else plain
                stream.sendall(f"GET /health HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
                return int(stream.recv(64).split(b" ")[1])
        except (OSError, ValueError, IndexError):
            return None


def _wrapped(plain: socket.socket, host: str) -> socket.socket:
    import ssl  # megabytes that few need

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
            return error.errno == errno.EADDRINUSE and not _connection_states(port)
    return False


_WITH_CLIENT = {"01", "04", "08"}
"""Established; closed by the server with an answer still to be delivered; closed by the client alone."""


def has_clients(port: int) -> bool:
    """Whether anybody is connected to the server that listens there."""
    return not _WITH_CLIENT.isdisjoint(_connection_states(port))


def _connection_states(port: int) -> set[str]:
    """Of every connection on a port that the kernel still knows; where that cannot be read, there may be any."""
    ending = f":{port:04X}"
    states: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with Path(table).open(encoding="ascii") as lines:
                states |= {fields[3] for line in lines if (fields := line.split())[1].endswith(ending)}
        except FileNotFoundError:
            continue  # no IPv6
        except OSError:
            return _WITH_CLIENT
    return states
