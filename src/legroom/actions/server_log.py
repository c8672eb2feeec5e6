"""What a server prints, kept in one file of bounded size: its start-up whole, then the newest of what followed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

HEAD_BYTES = 2 << 20
"""At most this much of a start-up is kept from its beginning on; a start-up prints a hundred KiB."""
TAIL_BYTES = 4 << 20
"""What stays of the rest when the file is made shorter, which happens when twice as much has come."""
_CUT = b"[legroom left out %d bytes here]\n"


class ServerLog:
    """Takes lines from several threads. A failing disk never stops the server: what cannot be kept is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._head: int | None = None
        self._lock = threading.Lock()
        self._file: int | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(self, lines: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            with contextlib.suppress(OSError):
                self.size += os.write(self._file, lines)
                if self._head is None and self.size > HEAD_BYTES:
                    self._head = HEAD_BYTES
                if self._head is not None and self.size > self._head + 2 * TAIL_BYTES:
                    self._shorten(self._head)

    def started(self) -> None:
        """The start-up is over: everything so far is kept from now on."""
        with self._lock:
            if self._head is None:
                self._head = self.size

    def close(self) -> None:
        """Nothing more comes."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _shorten(self, head: int) -> None:
        """Head and newest lines into a new file, which then takes the old one's place in one step."""
        shorter = self.path.with_name(f"{self.path.name}.new")
        with self.path.open("rb") as old, open(shorter, "wb", opener=_private) as new:
            _copy(old.fileno(), new, 0, head)
            cut = self.size - TAIL_BYTES
            new.write(_CUT % (cut - head))
            old.seek(cut)
            old.readline()
            _copy(old.fileno(), new, old.tell(), self.size)
        shorter.replace(self.path)
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self.size = self.path.stat().st_size


def _private(path: str, flags: int) -> int:
    """What a server prints is for its user alone."""
    return os.open(path, flags, 0o600)


def _copy(source: int, target: object, start: int, end: int) -> None:
    """A part of a file, a piece at a time: the memory of a supervisor stays small."""
    while start < end:
        piece = os.pread(source, min(1 << 16, end - start), start)
        if not piece:
            return
        target.write(piece)  # type: ignore[attr-defined]
        start += len(piece)


def last_lines(path: Path, count: int, reach_bytes: int = 1 << 16) -> list[str]:
    """The last lines of a log, without reading all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - reach_bytes, 0))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


_PIECE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
CALM_S = 0.1
"""Once a server is up its output is collected this long before it is passed on: ten wake-ups a second at most."""


class OutputRelay(threading.Thread):
    """One stream, in a thread of its own: when the reader of our output stalls, only that stream waits."""

    def __init__(self, source: int, target: int, log: ServerLog | None, see: Callable[[bytes], None] | None) -> None:
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
