"""Signals as something to wait on, beside sockets and pipes."""

from __future__ import annotations

import os
import signal
from types import FrameType

TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """While it is open, the signals that a service gets only make `fileno()` readable."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._terminal = _has_terminal()

    def __enter__(self) -> Signals:
        self._handlers = {number: signal.signal(number, _do_nothing) for number in TAKEN}
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reading)
        os.close(self._writing)

    def fileno(self) -> int:
        """What to wait on."""
        return self._reading

    def taken(self) -> list[int]:
        """The signals that came since the last call, in order. A terminal that closes asks to stop, not to restart."""
        try:
            numbers = list(os.read(self._reading, 64))
        except BlockingIOError:
            return []
        hung_up = self._terminal and not _has_terminal()
        return [signal.SIGTERM if hung_up and number == signal.SIGHUP else number for number in numbers]


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The wake-up pipe tells it."""


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
