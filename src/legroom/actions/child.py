"""A server as a child process of a keeper, which forwards its output and kills every process that it leaves behind."""

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

from legroom import process_table as processes
from legroom.actions.keeper import adopt_orphans, kill_all_below, send_signal
from legroom.actions.server_log import OutputRelay, ServerLog
from legroom.errors import UNREACHABLE, LegroomError

_KEEPER = "import sys; sys.path.insert(0, {folder!r}); from legroom.actions.keeper import main; main()"
_KILLED = signal.SIGKILL.value  # The wait status of a process that SIGKILL ended.


class Child:
    """One started server. Call `read` whenever `fileno()` is readable: the keeper has sent a message."""

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
        """Start the server under a keeper and wait for its PID; LegroomError where it could not be started."""
        adopt_orphans()  # if the keeper is killed, its children become ours
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        self.words = tuple(words)
        self.pid: int | None = None
        self.status: int | None = None
        self.gone = self.has_lost_keeper = False
        self._control, self._pending = ours, b""
        self._refusal: int | None = None
        program = _KEEPER.format(folder=str(Path(__file__).parents[2]))
        keeper_words = [sys.executable, "-I", "-S", "-c", program, str(theirs.fileno()), str(leftover_grace_s)]
        with theirs:
            # A new session, so that Ctrl-C in a terminal reaches legroom alone.
            self._keeper = subprocess.Popen(
                [*keeper_words, *words],
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
        while self.pid is None and not self.gone:
            self.read()
        if self.pid is None:
            self.close()
            reason = os.strerror(self._refusal) if self._refusal else "its keeper died"
            hint = "is it installed, and on the PATH?" if self._refusal == errno.ENOENT else ""
            raise LegroomError(f"{self.words[0]} could not be started: {reason}", hint, UNREACHABLE)

    @property
    def keeper_pid(self) -> int:
        """The PID of the keeper, the process between legroom and the server that reaps its children."""
        return self._keeper.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell reports it (128 + signal after a kill); None while it runs."""
        if self.status is None:
            return None
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code

    @property
    def is_blocked(self) -> bool:
        """Whether the reader of legroom's output has stalled, so that the server may block when it prints."""
        return any(stream.is_blocked for stream in self._streams)

    def fileno(self) -> int:
        """The descriptor of the socket to the keeper process, for select()."""
        return self._control.fileno()

    def read(self) -> None:
        """Handles the keeper's next messages: the server's pid, its exit, or the keeper's own death."""
        try:
            received = self._control.recv(4096)
        except OSError:
            received = b""
        if not received and not self.gone:
            # The kernel has killed the server with its keeper; its descendants are ours now.
            self._keeper.wait()
            self.has_lost_keeper = True
            kill_all_below(os.getpid())
            self.status = _KILLED if self.status is None else self.status
            self.gone = True
            return
        *lines, self._pending = (self._pending + received).split(b"\n")
        for line in lines:
            what, _, value = line.decode().partition(" ")
            if what == "gone":
                self.gone = True
            elif field := {"pid": "pid", "exit": "status", "failed": "_refusal"}.get(what):
                setattr(self, field, int(value))

    def send(self, signum: int) -> None:
        """Sends a signal to the server's first process, if it still runs."""
        self._send_to_keeper(f"signal {int(signum)}")

    def kill(self) -> None:
        """Sends SIGKILL to the server and all of its descendants."""
        self._send_to_keeper("kill")

    def kill_engines(self) -> bool:
        """Kills the engines, so that the API servers fail running requests and exit; False if there are none or the
        server itself is stopped (SIGSTOP) and could not."""
        if self.pid is None or processes.is_stopped(self.pid):
            return False
        # Several API servers are notified by an engine core whose worker dies (0.32), so only workers are killed there.
        # The data-parallel coordinator stays: after its death the API servers are stopped before they answer.
        table = processes.process_table()
        engines = processes.engines_below(self.pid, table) or self._stopped_engines(self.pid)
        if self.has_several_api_servers(table):
            cores = [pid for pid in engines if processes.engines_below(pid, table)]
            coordinators = [pid for pid in engines if processes.has_role(pid, "DPCoordinator")]
            engines = {pid: engines[pid] for pid in engines.keys() - {*cores, *coordinators}}
        return sum(send_signal(pid, start, signal.SIGKILL) for pid, start in engines.items()) > 0

    def has_stopped_engine(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the server or an engine; a stop by a debugger does not count."""
        return self.pid is not None and (processes.is_stopped(self.pid) or bool(self._stopped_engines(self.pid)))

    @staticmethod
    def _stopped_engines(server: int) -> dict[int, int]:
        """Pid -> start time of the stopped (SIGSTOP) engines of API server `server`, also untitled ones."""
        below = processes.descendants(server).items()
        return {pid: start for pid, start in below if processes.is_stopped(pid) and processes.engine_name(pid, server)}

    def has_several_api_servers(self, table: processes.ProcessTable | None = None) -> bool:
        """Whether the server has API servers as child processes, by `table` or else a new scan."""
        below = processes.descendants(self.pid, table) if self.pid is not None else ()
        return any(processes.has_role(pid, "APIServer") for pid in below)

    def wait_gone(self, timeout_s: float) -> bool:
        """Waits until all its processes have ended, up to `timeout_s`; returns whether they have."""
        until = time.monotonic() + timeout_s
        while not self.gone and (left := until - time.monotonic()) > 0:
            if select.select([self], [], [], left)[0]:
                self.read()
        return self.gone

    def mark_ready(self) -> None:
        """Called once the server is up: ends the line callback and forwards output in batches from now on."""
        for stream in self._streams:
            stream.is_batching = True
            stream.on_line = None

    def close(self, timeout_s: float = 15.0) -> None:
        """Kills the remaining processes, waits for them, and forwards the rest of the output."""
        self.kill()
        if not self.wait_gone(timeout_s):
            self._control.close()  # the keeper then kills everything, as after legroom's death
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(timeout_s)
        for stream in self._streams:
            stream.join(1.0)
        self._control.close()

    def _send_to_keeper(self, text: str) -> None:
        """Sends one line to the keeper; a keeper that has died is ignored."""
        with contextlib.suppress(OSError):
            self._control.sendall(text.encode() + b"\n")
