"""Health and hang checks of a server by GET /health over a plain socket, without an HTTP client."""

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path

from legroom.actions.child import Child
from legroom.process_table import ENGINE_ROLES, cpu_ticks, descendants, has_role
from legroom.records import dataclass

HANG_CHECKS = 4
"""Failed checks in a row before a server counts as hung."""


class HangWatch:
    """Detects a server that neither uses CPU time nor answers /health in several checks in a row. uvicorn's event loop
    wakes up ten times a second, so a live API server always uses CPU time. Only a server that used none since the last
    check is queried. A stopped engine (SIGSTOP) counts as hung, too."""

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

    def seconds_to_next_check(self) -> float | None:
        """Seconds until the next check; None where checks are off."""
        return max(self._due_s - self._clock(), 0.0) if self._interval_s else None

    def is_hung(self) -> bool:
        """Checks the server if a check is due; returns whether it has hung for the whole timeout."""
        if self.seconds_to_next_check() != 0.0:
            return False
        self._due_s = self._clock() + self._interval_s
        used = self._cpu_ticks()
        works = used is None or used != self._last_ticks
        self._last_ticks = used
        serves = (works or self._answers(min(5.0, self._interval_s))) and not self._is_stopped()
        self._silent = 0 if serves else self._silent + 1
        return self._silent >= HANG_CHECKS


def api_server_cpu_ticks(child: Child) -> Callable[[], int | None]:
    """A function that returns the CPU ticks of the server's processes except engines; None if not comparable now."""
    server = child.pid
    assert server is not None

    def front_cpu_ticks() -> int | None:
        """CPU ticks of these processes now; None where the output is blocked, one has ended, or none are counted."""
        front = [pid for pid in (server, *descendants(server)) if not has_role(pid, *ENGINE_ROLES)]
        ticks = [cpu_ticks(pid) for pid in front]
        if child.is_blocked or None in ticks:
            return None
        return sum(used or 0 for used in ticks) or None  # 0: the system counts no CPU time

    return front_cpu_ticks


@dataclass(frozen=True)
class ServerAddress:
    host: str
    port: int
    tls: bool = False

    def is_healthy(self) -> bool:
        """Whether /health answers 200."""
        return self._health_status(2.0) == 200

    def answers(self, timeout_s: float) -> bool:
        """Whether GET /health gets any HTTP status within the timeout."""
        return self._health_status(timeout_s) is not None

    def _health_status(self, timeout_s: float) -> int | None:
        """The HTTP status of GET /health; None where the server does not answer in time."""
        try:
            with socket.create_connection((self.host, self.port), timeout_s) as plain:
                plain.settimeout(timeout_s)
                stream = plain
                if self.tls:
                    import ssl  # megabytes of memory

                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # a child process of ours
                    stream = context.wrap_socket(plain, server_hostname=self.host)
                stream.sendall(f"GET /health HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
                return int(stream.recv(64).split(b" ")[1])
        except (OSError, ValueError, IndexError):
            return None


def port_problem(host: str, port: int) -> str:
    """Why a server cannot listen on a port, as a sentence; empty where it can."""
    # vLLM binds with SO_REUSEPORT, so a second server on the port would start and take half of the requests.
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
    """Whether a process has bound the port without listening, as a vLLM does while it starts."""
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE and not _connection_states(port)
    return False


_WITH_CLIENT = {"01", "04", "08"}  # States in /proc/net/tcp: ESTABLISHED, FIN_WAIT1 and CLOSE_WAIT.


def has_clients(port: int) -> bool:
    """Whether a client is connected to the port; True where /proc/net/tcp cannot be read."""
    return not _WITH_CLIENT.isdisjoint(_connection_states(port))


def _connection_states(port: int) -> set[str]:
    """State codes (/proc/net/tcp) of a local port's TCP sockets; where unreadable, codes that include a client."""
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
