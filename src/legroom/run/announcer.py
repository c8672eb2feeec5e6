"""legroom's own lines, beside those of the server."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading

PREFIX = "legroom: "
_MOST_LINES = 10_000
"""That wait for a reader who stalls; what is said beyond is lost."""
_PATIENCE_S = 0.5
"""For a reader who stalls, in the end."""


class Announcer:
    """Writes lines to stderr in a thread of its own. Whoever reads it may stall (a pager, Ctrl-S, a slow disk), and
    that must not keep a signal from being heeded."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, daemon=True)

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.put(None)
        self._thread.join(_PATIENCE_S)

    def say(self, line: str) -> None:
        """A line of legroom's own, told apart from the server's by its beginning."""
        if self._lines.qsize() < _MOST_LINES:
            self._lines.put(f"{PREFIX}{line}\n")

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):  # nobody reads it any more; the server goes on
                _write(line)


def _write(line: str) -> None:
    """Past Python's own buffer: who holds that at the end of a program keeps it from ending."""
    try:
        target = sys.stderr.fileno()
    except (OSError, ValueError):  # a stand-in without a file, as in tests
        sys.stderr.write(line)
        return
    rest = line.encode("utf-8", "replace")
    while rest:
        rest = rest[os.write(target, rest) :]
