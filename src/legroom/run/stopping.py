"""Signals of `legroom run`, and the deadlines of a stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.actions.child import Child

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TERMINAL_CLOSE_S = 2.0
"""Window in which a second SIGHUP belongs to the same closed terminal: kernel and shell both send one."""


class Signals:
    """A context in which handled signals only make `fileno()` readable."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._terminal = _has_terminal()
        self._terminal_closed_s: float | None = None

    def __enter__(self) -> Signals:
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in HANDLED_SIGNALS}
        self._nohup = self._handlers[signal.SIGHUP] == signal.SIG_IGN
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)

    def fileno(self) -> int:
        return self._reading

    def received(self) -> list[int]:
        """Signals since the last call, in order; a closed terminal's SIGHUP becomes SIGTERM (nothing under nohup)."""
        try:
            numbers = list(os.read(self._reading, 64))
        except BlockingIOError:
            return []
        if signal.SIGHUP not in numbers:
            return numbers
        now_s = time.monotonic()
        has_closed = self._terminal and not _has_terminal()
        if has_closed:
            self._terminal, self._terminal_closed_s = False, now_s
        elif self._terminal_closed_s is None or now_s - self._terminal_closed_s >= _TERMINAL_CLOSE_S:
            return numbers
        others = [number for number in numbers if number != signal.SIGHUP]
        return [*others, signal.SIGTERM] if has_closed and not self._nohup else others


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


SHUTDOWN_GRACE_S = 15.0
"""Time for vLLM's shutdown after its own drain."""
ERROR_REPLY_S = 1.0
"""Time for a server with killed engines to answer its clients and exit. Without requests it checks its engines every
five seconds only (0.32), so it gets SIGINT when no client is left, or after this."""
STOPPED_REPLY_S = 10.0
"""The same time where an engine is stopped and nobody asked for an end at once: a busy machine needs seconds."""
EXIT_GRACE_S = 1.5
"""Time to exit after that."""
KILL_GRACE_S = 5.0
STARTING_GRACE_S = 10.0
"""A starting server has no requests to finish, and vLLM 0.32 ignores SIGTERM before it is up."""
_STOPPED_CHECK_S = 1.0  # Between two looks for a stopped engine during a drain.
_STOPPED = "an engine is stopped (SIGSTOP), and no request can finish"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Stopping:
    """SIGTERM drains; SIGINT or a second signal ends the server at once; one more kills it; SIGHUP restarts it.

    To end at once, the engines are killed: the API server then answers running requests with an error and exits. After
    SIGINT alone vLLM would drain as after SIGTERM, and with --shutdown-timeout 0 it hangs (0.32).

    vLLM answers 500 to new requests while it drains. With a guard, `start_drain` makes the guard refuse new requests
    first, and the server gets SIGTERM when `on_drained` is called.
    """

    def __init__(
        self,
        drain_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        start_drain: Callable[[float], None] | None = None,
        has_clients: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stop_requested = False
        self.restart_requested = False
        self.is_up = False
        """Whether the server serves; a starting one gets less time to exit."""
        self._drain_s, self._say, self._clock = drain_s, say, clock
        self._start_drain, self._has_clients = start_drain, has_clients
        self._has_drained = self._is_draining = self._is_replying = self._ends_at_once = False
        self._immediate_signal = 0
        """The signal that requested an immediate end."""
        self._stop_signals = 0
        self._deadline_s: float | None = None
        self._killed_by_signal = 0
        """The signal that requested an immediate end, where it took SIGKILL."""

    @property
    def is_stopping(self) -> bool:
        """Whether the server is to end, for good or for a restart."""
        return self.stop_requested or self.restart_requested

    def reset(self) -> None:
        """Resets the state after the server of a requested restart has ended."""
        self.restart_requested, self._stop_signals, self._deadline_s = False, 0, None
        self._immediate_signal = 0
        self._has_drained = self._is_draining = self._is_replying = self._ends_at_once = False

    def exit_code(self, code: int) -> int:
        """legroom's exit code for the server's: 137 (SIGKILL) becomes that of the stop signal, as 130 for Ctrl-C."""
        return 128 + self._killed_by_signal if self._killed_by_signal and code == 128 + signal.SIGKILL else code

    def left_s(self) -> float | None:
        """Seconds until the deadline; None where there is none."""
        return None if self._deadline_s is None else max(self._deadline_s - self._clock(), 0.0)

    def next_check_s(self) -> float | None:
        """Seconds until `check` should be called again; None where no deadline runs."""
        left_s = self.left_s()
        return None if left_s is None else min(left_s, 0.1 if self._is_replying else _STOPPED_CHECK_S)

    def on_signal(self, number: int, server: Child | None) -> None:
        """Drains, ends, kills or restarts the server (None between starts), by the signals so far; forwards others."""
        if number == signal.SIGHUP:
            self._on_restart_signal(server)
        elif number in _ENDING:
            self._on_stop_signal(number, server)
        elif server is not None:
            server.send(number)

    def check(self, server: Child | None) -> None:
        """Takes the next step of a stop if its deadline has passed, no client is left or an engine is stopped."""
        if server is None:
            return
        if self.left_s() and not self._ends_at_once and self._has_stopped_engine(server):
            self._say(f"{_STOPPED}: ending it at once")
            self._terminate_now(server, signal.SIGINT, STOPPED_REPLY_S)
            return
        if self._is_replying and (self.left_s() == 0.0 or not self._has_clients()):
            self._is_replying = False
            if server.has_several_api_servers():  # they would wait for each other (0.32)
                self._kill(server)
            else:
                self._signal_with_grace(server, signal.SIGINT, EXIT_GRACE_S)
            return
        if self.left_s() != 0.0:
            return
        if self._is_draining:
            self.on_drained(server, is_late=True)
            return
        self._say("it did not go in time: killing it")
        self._kill(server)

    def on_drained(self, server: Child, is_late: bool = False) -> None:
        """After the guard's drain: sends SIGTERM, with time for vLLM's own drain unless `is_late`."""
        if self._is_draining:
            self._is_draining = False
            drain_s = 0.0 if is_late else self._drain_s
            self._signal_with_grace(server, signal.SIGTERM, drain_s + SHUTDOWN_GRACE_S)

    def _on_restart_signal(self, server: Child | None) -> None:
        """Ends the server for a restart, with time to drain unless an engine is stopped; ignored while stopping."""
        if self.is_stopping:
            return
        self.restart_requested = True
        if server is None:
            self._say("SIGHUP: the next start takes what was left for it")
            return
        if self._has_stopped_engine(server):
            self._say(f"SIGHUP: {_STOPPED}: ending it at once, then starting again")
            self._terminate_now(server, signal.SIGINT, STOPPED_REPLY_S)
            return
        self._say("SIGHUP: draining, then starting again")
        self._terminate(server, signal.SIGTERM, self._sigterm_grace_s())

    def _on_stop_signal(self, number: int, server: Child | None) -> None:
        """Drains on a first SIGTERM; ends the server at once on another signal or a second one; then kills it."""
        self.stop_requested, self.restart_requested = True, False
        self._stop_signals += 1
        if server is None:
            return
        if self._immediate_signal:
            self._say("killing it")
            self._is_replying = False
            self._kill(server)
        elif number == signal.SIGTERM and self._stop_signals == 1 and not self._has_stopped_engine(server):
            grace_s = self._sigterm_grace_s()
            self._say(f"SIGTERM: draining, {grace_s:.0f} s at most; once more ends it at once")
            self._terminate(server, number, grace_s)
        else:
            why = f"{_STOPPED}: " if self._has_stopped_engine(server) else ""
            self._say(f"{signal.Signals(number).name}: {why}ending at once; once more kills")
            self._immediate_signal = number
            reply_s = STOPPED_REPLY_S if number == signal.SIGTERM and self._stop_signals == 1 else ERROR_REPLY_S
            self._terminate_now(server, signal.SIGINT if number == signal.SIGTERM else number, reply_s)

    def _has_stopped_engine(self, server: Child) -> bool:
        """Whether an engine process is stopped (SIGSTOP), so that a drain would only end at its deadline."""
        return self.is_up and server.has_stopped_engine()

    def _sigterm_grace_s(self) -> float:
        """Seconds to wait after SIGTERM before the next step; they include the drain time if the server is up."""
        return self._drain_s + SHUTDOWN_GRACE_S if self.is_up else STARTING_GRACE_S

    def _terminate(self, server: Child, signal_number: int, grace_s: float) -> None:
        """Starts the guard's drain, if there is one; otherwise sends the signal, with `grace_s` to end."""
        if self.is_up and self._start_drain is not None and not self._has_drained:
            self._has_drained = self._is_draining = True
            self._start_drain(self._drain_s)
            self._deadline_s = self._clock() + self._drain_s
        elif not self._is_draining:
            self._signal_with_grace(server, signal_number, grace_s)

    def _terminate_now(self, server: Child, signal_number: int, reply_s: float) -> None:
        """Kills the engines and gives the API server `reply_s` to answer open requests with an error; sends the signal
        if the server is not up or has no engine."""
        self._is_draining, self._ends_at_once = False, True
        if self.is_up and server.kill_engines():
            self._is_replying = True
            self._deadline_s = self._clock() + reply_s
        else:
            self._signal_with_grace(server, signal_number, KILL_GRACE_S)

    def _kill(self, server: Child) -> None:
        """Kills all processes of the server, and sets the deadline for their end."""
        server.kill()
        self._killed_by_signal = self._immediate_signal
        self._deadline_s = self._clock() + KILL_GRACE_S

    def _signal_with_grace(self, server: Child, signal_number: int, grace_s: float) -> None:
        """Sends the signal, and sets the deadline `grace_s` seconds from now."""
        server.send(signal_number)
        self._deadline_s = self._clock() + grace_s
