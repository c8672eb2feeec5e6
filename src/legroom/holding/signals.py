"""Signals as something to wait on, beside sockets and pipes."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

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
        """What to wait on."""
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
    """The wake-up pipe tells it."""


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
