"""What a server prints, kept in one file of bounded size: its start-up whole, then the newest of what followed."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

HEAD_BYTES = 2 << 20
"""At most this much of a start-up is kept from its beginning on; a start-up prints a hundred KiB."""
TAIL_BYTES = 4 << 20
"""What stays of the rest when the file is made shorter, which happens when twice as much has come."""
UNWRITTEN_BYTES = 1 << 20
"""What is kept in memory of lines that the disk does not take."""
_CUT = b"[legroom left out %d bytes here]\n"


class ServerLog:
    """Takes lines from several threads. A failing disk never stops the server: the newest of what cannot be written is
    kept in memory, and written once there is room again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._head: int | None = None
        self._lock = threading.Lock()
        self._file: int | None = None
        self._unwritten = b""
        """What the disk did not take."""
        self._dropped = 0
        """How many bytes of that were too many for the memory."""
        self._copy: int | None = None
        self._shorten_at = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND, 0o600)
        except OSError:
            self._file = None

    @property
    def problem(self) -> bool:
        """Whether lines are in memory alone."""
        return bool(self._unwritten)

    def write(self, lines: bytes) -> None:
        with self._lock:
            self._unwritten += lines
            try:
                self._write_out()
            except OSError:
                self._keep_newest()

    def started(self) -> None:
        """The start-up is over: everything so far is kept from now on."""
        with self._lock:
            if self._head is None:
                self._head = self.size

    def close(self) -> None:
        """Nothing more comes. What was never written stays readable at `readable`."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def readable(self) -> Path:
        """Where all that is kept can be read, also by another process of the user: the file, or a copy in memory with
        what the disk did not take."""
        with self._lock:
            if not self._unwritten or not hasattr(os, "memfd_create"):
                return self.path
            self._forget_copy()
            self._copy = os.memfd_create("legroom-log")
            with contextlib.suppress(OSError), self.path.open("rb") as written:
                # Only as much as is ours: without a file of our own there may be one of a run before.
                _copy(written.fileno(), self._append, 0, self.size)
            if self._dropped:
                self._append(_CUT % self._dropped)
            self._append(self._unwritten)
            return Path(f"/proc/{os.getpid()}/fd/{self._copy}")

    def forget(self) -> None:
        """Nobody reads it any more."""
        with self._lock:
            self._forget_copy()
            self._unwritten = b""

    def _forget_copy(self) -> None:
        if self._copy is not None:
            os.close(self._copy)
        self._copy = None

    def _append(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._copy or 0, piece) :]

    def _write_out(self) -> None:
        if self._file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._dropped:
            os.write(self._file, _CUT % self._dropped)
            self._dropped, self.size = 0, os.fstat(self._file).st_size
        while self._unwritten:
            written = os.write(self._file, self._unwritten)
            self._unwritten, self.size = self._unwritten[written:], self.size + written
        if self._head is None and self.size > HEAD_BYTES:
            self._head = HEAD_BYTES
        if self._head is not None and self.size > max(self._head + 2 * TAIL_BYTES, self._shorten_at):
            self._shorten(self._head)

    def _keep_newest(self) -> None:
        over = len(self._unwritten) - UNWRITTEN_BYTES
        if over > 0:
            cut = self._unwritten.find(b"\n", over) + 1 or over
            self._unwritten, self._dropped = self._unwritten[cut:], self._dropped + cut

    def _shorten(self, head: int) -> None:
        """Head and newest lines into a new file, which then takes the old one's place in one step. Where there is no
        room for it, the file is cut in place: a log that cannot be shortened must not be copied again and again."""
        self._shorten_at = self.size + TAIL_BYTES  # where neither works, not before as much has come again
        try:
            self._rewrite(head)
        except OSError:
            self._cut_in_place(head)
        self._shorten_at = 0

    def _rewrite(self, head: int) -> None:
        shorter = self.path.with_name(f"{self.path.name}.new")
        try:
            with self.path.open("rb") as old, open(shorter, "wb", opener=_private) as new:
                _copy(old.fileno(), new.write, 0, head)
                cut = self.size - TAIL_BYTES
                new.write(_CUT % (cut - head))
                old.seek(cut)
                old.readline()
                _copy(old.fileno(), new.write, old.tell(), self.size)
            shorter.replace(self.path)
        except OSError:
            shorter.unlink(missing_ok=True)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self.size = self.path.stat().st_size

    def _cut_in_place(self, head: int) -> None:
        """The newest lines pass through memory."""
        assert self._file is not None
        newest = os.pread(self._file, UNWRITTEN_BYTES, self.size - UNWRITTEN_BYTES).partition(b"\n")[2]
        os.ftruncate(self._file, head)
        self._dropped += self.size - head - len(newest)
        self.size, self._unwritten = head, newest


def _private(path: str, flags: int) -> int:
    """What a server prints is for its user alone."""
    return os.open(path, flags, 0o600)


def _copy(source: int, write: Callable[[bytes], object], start: int, end: int) -> None:
    """A part of a file, a piece at a time: the memory of a supervisor stays small."""
    while start < end:
        piece = os.pread(source, min(1 << 16, end - start), start)
        if not piece:
            return
        write(piece)
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
BATCH_S = 0.1
"""Once a server is up its output is collected this long before it is passed on: ten wake-ups a second at most."""
_MUCH_BYTES = 1 << 12
"""A server that prints more at a time, such as a traceback for each client when its engine dies, is not kept waiting: a
pipe holds 64 KiB, and until there is room it answers nobody."""


class OutputRelay(threading.Thread):
    """One stream, in a thread of its own: when the reader of our output stalls, only that stream waits."""

    def __init__(
        self, source: int, target: int, log: ServerLog | None, on_line: Callable[[bytes], None] | None
    ) -> None:
        super().__init__(daemon=True)
        self.is_batching = False
        self.is_blocked = False
        """Whether it waits for the reader of our output: a paused terminal (Ctrl-S), a pager."""
        self._source, self._target, self._log, self._on_line = source, target, log, on_line
        self._target_open = True
        self._rest = b""

    def run(self) -> None:
        """Until every process that holds the other end is gone."""
        while piece := self._read():
            self._log_lines(piece)
            self._forward(piece)
            if self.is_batching and len(piece) < _MUCH_BYTES:
                time.sleep(BATCH_S)
        if self._rest:
            self._log_lines(b"\n")
        os.close(self._source)

    def set_line_callback(self, on_line: Callable[[bytes], None] | None) -> None:
        """Change who reads along; None: nobody."""
        self._on_line = on_line

    def _read(self) -> bytes:
        try:
            return os.read(self._source, _PIECE_BYTES)
        except OSError:
            return b""

    def _log_lines(self, piece: bytes) -> None:
        whole, newline, rest = (self._rest + piece).rpartition(b"\n")
        if not newline and len(rest) <= _LONGEST_LINE:
            self._rest = rest
            return
        lines, self._rest = (whole + b"\n", rest) if newline else (rest + b"\n", b"")
        if self._log is not None:
            self._log.write(lines)
        if (on_line := self._on_line) is not None:
            for line in lines.split(b"\n")[:-1]:
                on_line(line)

    def _forward(self, piece: bytes) -> None:
        if not self._target_open:
            return
        try:
            while piece:
                self.is_blocked = True
                piece = piece[os.write(self._target, piece) :]
                self.is_blocked = False
        except BlockingIOError:
            with contextlib.suppress(OSError):
                os.set_blocking(self._target, True)
                self._forward(piece)
        except OSError as error:
            # A full disk has room again some day; else nobody reads our output any more. The server goes on.
            self.is_blocked = False
            self._target_open = error.errno in (errno.ENOSPC, errno.EDQUOT)
