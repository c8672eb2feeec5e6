"""A server's output, passed on as it comes: to legroom's own stream, to the kept log, and to whoever reads along."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from legroom.actions.kept_log import KeptLog

_PIECE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
CALM_S = 0.1
"""Once a server is up its output is collected this long before it is passed on: ten wake-ups a second at most."""


class PassingOn(threading.Thread):
    """One stream, in a thread of its own: when the reader of our output stalls, only that stream waits."""

    def __init__(self, source: int, target: int, log: KeptLog | None, see: Callable[[bytes], None] | None) -> None:
        super().__init__(daemon=True)
        self.calm = False
        self.is_held_up = False
        """Whether it waits for the reader of our output: a paused terminal (Ctrl-S), a pager."""
        self._source, self._target, self._log, self._see = source, target, log, see
        self._target_open = True
        self._rest = b""

    def run(self) -> None:
        """Until every process that holds the other end is gone."""
        while piece := self._read():
            self._keep(piece)
            self._pass(piece)
            if self.calm:
                time.sleep(CALM_S)
        if self._rest:
            self._keep(b"\n")
        os.close(self._source)

    def read_along(self, see: Callable[[bytes], None] | None) -> None:
        """Change who reads along; None: nobody."""
        self._see = see

    def _read(self) -> bytes:
        try:
            return os.read(self._source, _PIECE_BYTES)
        except OSError:
            return b""

    def _keep(self, piece: bytes) -> None:
        whole, newline, rest = (self._rest + piece).rpartition(b"\n")
        if not newline and len(rest) <= _LONGEST_LINE:
            self._rest = rest
            return
        lines, self._rest = (whole + b"\n", rest) if newline else (rest + b"\n", b"")
        if self._log is not None:
            self._log.write(lines)
        if (see := self._see) is not None:
            for line in lines.split(b"\n")[:-1]:
                see(line)

    def _pass(self, piece: bytes) -> None:
        if not self._target_open:
            return
        try:
            while piece:
                self.is_held_up = True
                piece = piece[os.write(self._target, piece) :]
                self.is_held_up = False
        except BlockingIOError:
            with contextlib.suppress(OSError):
                os.set_blocking(self._target, True)
                self._pass(piece)
        except OSError:
            self._target_open = self.is_held_up = False  # nobody reads our output any more; the server goes on
