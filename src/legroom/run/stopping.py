"""What a signal asks for, and how long a server may take to do it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_HANGING_UP_S = 2.0
"""The kernel and the shell both tell of a terminal that closes."""


class Signals:
    """While it is open, the signals that a service gets only make `fileno()` readable."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._terminal = _has_terminal()
        self._hung_up_s: float | None = None

    def __enter__(self) -> Signals:
        self._handlers = {number: signal.signal(number, _do_nothing) for number in TAKEN}
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

    def taken(self) -> list[int]:
        """The signals that came since the last call, in order.

        A terminal that closes asks to stop, not to restart; under `nohup` it asks for nothing.
        """
        try:
            numbers = list(os.read(self._reading, 64))
        except BlockingIOError:
            return []
        if signal.SIGHUP not in numbers:
            return numbers
        now_s = time.monotonic()
        has_closed = self._terminal and not _has_terminal()
        if has_closed:
            self._terminal, self._hung_up_s = False, now_s
        elif self._hung_up_s is None or now_s - self._hung_up_s >= _HANGING_UP_S:
            return numbers
        others = [number for number in numbers if number != signal.SIGHUP]
        return [*others, signal.SIGTERM] if has_closed and not self._nohup else others


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The wake-up pipe has it."""


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


GRACE_S = 15.0
"""What vLLM may take beyond its own drain to take itself down."""
INTERRUPT_S = 30.0
HURRY_S = 5.0
NOT_UP_S = 10.0
"""A server that is still starting has no request to finish, and vLLM 0.32 does not hear SIGTERM before it is up."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Stoppable(Protocol):
    """What can be stopped."""

    def send(self, number: int) -> None:
        """A signal to it."""

    def kill(self) -> None:
        """All of it, at once."""


class Stopping:
    """SIGTERM drains, SIGINT ends, a second one of either hurries, a third kills; SIGHUP drains and starts anew.

    vLLM answers 500 to what comes while it drains. Where a guard admits its requests, `start_drain` lets it admit
    nothing new and begins to wait for the rest, and the server hears SIGTERM when `drained` is called.
    """

    def __init__(
        self,
        drain_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        start_drain: Callable[[float], None] | None = None,
    ) -> None:
        self.for_good = False
        """Whether it was asked to stop, so that nothing is started any more."""
        self.restart = False
        self.is_up = False
        """Whether the server serves; one that is still starting gets less time to go."""
        self._drain_s, self._say, self._clock = drain_s, say, clock
        self._start_drain = start_drain
        self._has_drained = self._is_draining = False
        self._asked = 0
        self._deadline_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the server is on its way out because somebody asked."""
        return self.for_good or self.restart

    def restarting(self) -> None:
        """The server that was to be replaced is gone."""
        self.restart, self._asked, self._deadline_s = False, 0, None
        self._has_drained = self._is_draining = False

    def left_s(self) -> float | None:
        """How long until the deadline; None where there is none."""
        return None if self._deadline_s is None else max(self._deadline_s - self._clock(), 0.0)

    def take(self, number: int, server: Stoppable | None) -> None:
        """A signal came."""
        if number == signal.SIGHUP:
            self._take_restart(server)
        elif number in _ENDING:
            self._take_end(number, server)
        elif server is not None:
            server.send(number)

    def check(self, server: Stoppable | None) -> None:
        """Kill what has not gone by its deadline."""
        if server is None or self.left_s() != 0.0:
            return
        if self._is_draining:
            self.drained(server, GRACE_S)
            return
        self._say("it did not go in time: killing it")
        server.kill()
        self._deadline_s = self._clock() + HURRY_S

    def drained(self, server: Stoppable, patience_s: float | None = None) -> None:
        """No request is left in the server, or it cannot be told: the server itself is asked to go."""
        if self._is_draining:
            self._is_draining = False
            self._send(server, signal.SIGTERM, self._drain_s + GRACE_S if patience_s is None else patience_s)

    def _take_restart(self, server: Stoppable | None) -> None:
        if self.begun:
            return
        self.restart = True
        if server is None:
            self._say("SIGHUP: the next start takes what was left for it")
            return
        self._say("SIGHUP: draining, then starting again")
        self._end(server, signal.SIGTERM, self._patience_s(signal.SIGTERM))

    def _take_end(self, number: int, server: Stoppable | None) -> None:
        self.for_good, self.restart = True, False
        self._asked += 1
        if server is None:
            return
        if self._asked == 1:
            patience_s = self._patience_s(number)
            what = "draining" if number == signal.SIGTERM else "ending"
            self._say(f"{signal.Signals(number).name}: {what}, {patience_s:.0f} s at most; once more hurries")
            self._end(server, number, patience_s)
        elif self._asked == 2:
            self._say(f"hurrying: {HURRY_S:.0f} s at most")
            self._end(server, signal.SIGINT, HURRY_S)
        else:
            self._say("killing it")
            server.kill()

    def _patience_s(self, number: int) -> float:
        if not self.is_up:
            return NOT_UP_S
        return self._drain_s + GRACE_S if number == signal.SIGTERM else INTERRUPT_S

    def _end(self, server: Stoppable, number: int, patience_s: float) -> None:
        if number == signal.SIGTERM and self.is_up and self._start_drain is not None and not self._has_drained:
            self._has_drained = self._is_draining = True
            self._start_drain(self._drain_s)
            self._deadline_s = self._clock() + self._drain_s
        elif number != signal.SIGTERM or not self._is_draining:  # else it is on its way already
            self._is_draining = False
            self._send(server, number, patience_s)

    def _send(self, server: Stoppable, number: int, patience_s: float) -> None:
        server.send(number)
        self._deadline_s = self._clock() + patience_s
