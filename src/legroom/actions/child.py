"""A server as a child: started below a keeper, its output passed on, its end seen, nothing of it left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from legroom.actions.descendants import adopt_orphans, kill_all_below, send
from legroom.actions.server_log import OutputRelay, ServerLog
from legroom.errors import UNREACHABLE, LegroomError
from legroom.process_table import ProcessTable, descendants, engines_below, is_api_server, is_coordinator, process_table

_KEEPER = "import sys; sys.path.insert(0, {folder!r}); from legroom.actions.keeper import main; main()"
_KILLED = signal.SIGKILL.value
"""The wait status of a process that was killed."""


class Child:
    """One started server. `read` what its keeper says whenever `fileno()` is readable; nothing here waits unasked."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        log: ServerLog | None = None,
        on_line: Callable[[bytes], None] | None = None,
        outputs: tuple[int, int] = (1, 2),
        leftover_grace_s: float = 3.0,
    ) -> None:
        adopt_orphans()  # where the keeper is killed, what it kept comes to us
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        self.words = tuple(words)
        self.pid: int | None = None
        self.status: int | None = None
        self.gone = False
        self._control, self._pending = ours, b""
        self._refusal: int | None = None
        folder = str(Path(__file__).parents[2])
        line = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _KEEPER.format(folder=folder),
            str(theirs.fileno()),
            str(leftover_grace_s),
            *words,
        ]
        with theirs:
            # A session of its own: Ctrl-C in a terminal goes to legroom, which decides what the server gets.
            self._keeper = subprocess.Popen(
                line,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._streams = []
        for (source, writing), target in zip(pipes, outputs, strict=True):
            os.close(writing)
            self._streams.append(OutputRelay(source, target, log, on_line))
        for stream in self._streams:
            stream.start()
        self._await_start()

    @property
    def keeper_pid(self) -> int:
        """The process between this one and the server."""
        return self._keeper.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell would say it: 128 and the signal's number for one that was killed. None while it runs."""
        if self.status is None:
            return None
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    @property
    def is_blocked(self) -> bool:
        """Whether nobody reads what it prints, so that it may have to wait."""
        return any(stream.is_blocked for stream in self._streams)

    def fileno(self) -> int:
        return self._control.fileno()

    def read(self) -> None:
        """Take in what the keeper has said."""
        try:
            received = self._control.recv(4096)
        except OSError:
            received = b""
        if not received and not self.gone:
            self._on_keeper_death()
            return
        *lines, self._pending = (self._pending + received).split(b"\n")
        for line in lines:
            self._on_keeper_line(line.decode())

    def send(self, number: int) -> None:
        """A signal to the server's first process; nothing happens where it has ended."""
        self._send_to_keeper(f"signal {int(number)}")

    def kill(self) -> None:
        """SIGKILL to the server and everything below it."""
        self._send_to_keeper("kill")

    def kill_engines(self) -> bool:
        """SIGKILL to its engines alone: the API server answers what is in flight with an error, and ends. Whether
        there were any."""
        return self.pid is not None and kill_engines(self.pid) > 0

    def has_several_api_servers(self) -> bool:
        """Whether its API servers are processes of their own."""
        return self.pid is not None and has_several_api_servers(self.pid)

    def wait_gone(self, patience_s: float) -> bool:
        """Whether nothing of it is left, waiting as long as that."""
        until = time.monotonic() + patience_s
        while not self.gone and (left := until - time.monotonic()) > 0:
            if select.select([self], [], [], left)[0]:
                self.read()
        return self.gone

    def mark_ready(self) -> None:
        """It is up: read along no more, and wake up less often for its output."""
        for stream in self._streams:
            stream.is_batching = True
            stream.set_line_callback(None)

    def close(self, patience_s: float = 15.0) -> None:
        """Kill what is left, wait for it, and pass on the last of its output."""
        self.kill()
        if not self.wait_gone(patience_s):
            self._control.close()  # a keeper that does not answer reads this as our death, and cleans up
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(patience_s)
        for stream in self._streams:
            stream.join(1.0)
        self._control.close()

    def _await_start(self) -> None:
        while self.pid is None and not self.gone:
            self.read()
        if self.pid is None:
            self.close()
            reason = os.strerror(self._refusal) if self._refusal else "its keeper died"
            hint = "is it installed, and on the PATH?" if self._refusal == errno.ENOENT else ""
            raise LegroomError(f"{self.words[0]} could not be started: {reason}", hint, UNREACHABLE)

    def _on_keeper_line(self, line: str) -> None:
        what, _, value = line.partition(" ")
        if what == "pid":
            self.pid = int(value)
        elif what == "exit":
            self.status = int(value)
        elif what == "gone":
            self.gone = True
        elif what == "failed":
            self._refusal = int(value)

    def _send_to_keeper(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(text.encode() + b"\n")

    def _on_keeper_death(self) -> None:
        """The keeper was killed: the kernel took the server along, and what the server had started is ours now."""
        self._keeper.wait()
        kill_all_below(os.getpid())
        self.status = _KILLED if self.status is None else self.status
        self.gone = True


def kill_engines(server: int) -> int:
    """SIGKILL to the engines below a server, so that its API servers answer what is in flight with an error; how many
    processes that were.

    A single API server sees its engine die. Several that share their engines (--api-server-count, data parallelism) do
    not, and must be told by the engine: an engine core whose worker dies tells them, and ends (0.32). Without workers
    of its own it cannot, so then it goes itself. The coordinator of data parallelism stays: when it dies, the API
    servers are stopped before the engines can tell them anything.

    One look at the table of processes is enough: on a busy machine every further one may cost a tenth of a second.
    """
    table = process_table()
    engines = engines_below(server, table)
    if has_several_api_servers(server, table):
        engines = {
            pid: start for pid, start in engines.items() if not is_coordinator(pid) and not engines_below(pid, table)
        }
    return sum(send(pid, start, signal.SIGKILL) for pid, start in engines.items())


def has_several_api_servers(server: int, table: ProcessTable | None = None) -> bool:
    """Whether the server is the process that waits for API servers below it, and not the only one itself."""
    return any(is_api_server(pid) for pid in descendants(server, table))
