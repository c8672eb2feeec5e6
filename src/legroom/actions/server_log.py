"""A server's output in a file of bounded size: the whole start-up, then the newest lines."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HEAD_BYTES = 2 << 20
"""The most that is kept of a start-up, which prints about 100 KiB."""
TAIL_BYTES = 4 << 20
"""What is kept of later output. The file is shortened when it has twice as much."""
UNWRITTEN_BYTES = 1 << 20
"""The most that is buffered in memory while the disk is full."""
_CUT = b"[legroom left out %d bytes here]\n"


class ServerLog:
    """A log file that several threads write to. While the disk is full, the newest lines are buffered in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._head: int | None = None
        self._lock = threading.Lock()
        self._file: int | None = None
        self._unwritten = b""
        """Lines that could not be written yet."""
        self._dropped = 0
        """Bytes that were dropped because the buffer was full."""
        self._copy: int | None = None
        self._shorten_at = 0
        self.problem = False
        """Whether lines were left in the buffer by the last write, as on a full disk; read without the lock."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND, 0o600)
        except OSError:
            self._file = None

    def write(self, lines: bytes) -> None:
        """Appends whole lines to the log file; if the disk fails, keeps them in memory, dropping the oldest."""
        with self._lock:
            self._unwritten += lines
            try:
                self._write_buffered()
            except OSError:
                over = len(self._unwritten) - UNWRITTEN_BYTES
                if over > 0:
                    cut = self._unwritten.find(b"\n", over) + 1 or over
                    self._unwritten, self._dropped = self._unwritten[cut:], self._dropped + cut
            self.problem = bool(self._unwritten)

    def started(self) -> None:
        """Marks the end of the start-up, whose lines (up to 2 MiB) are never dropped."""
        with self._lock:
            if self._head is None:
                self._head = self.size

    def close(self) -> None:
        """Closes the file; buffered lines can still be read at `readable`."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def readable(self) -> Path:
        """A path at which other processes can read the whole log: the file, or a memfd with buffered lines too."""
        with self._lock:
            if not self._unwritten or not hasattr(os, "memfd_create"):
                return self.path
            self._close_copy()
            self._copy = os.memfd_create("legroom-log")
            with contextlib.suppress(OSError), self.path.open("rb") as written:
                # The file may be of an earlier run, where this one could not create its own.
                _copy_range(written.fileno(), self._append_to_copy, 0, self.size)
            if self._dropped:
                self._append_to_copy(_CUT % self._dropped)
            self._append_to_copy(self._unwritten)
            return Path(f"/proc/{os.getpid()}/fd/{self._copy}")

    def forget(self) -> None:
        """Frees the lines buffered in memory and the in-memory copy of the log."""
        with self._lock:
            self._close_copy()
            self._unwritten, self.problem = b"", False

    def _close_copy(self) -> None:
        """Closes the memfd that `readable` made."""
        if self._copy is not None:
            os.close(self._copy)
        self._copy = None

    def _append_to_copy(self, piece: bytes) -> None:
        """Appends bytes to the memfd behind `readable`."""
        while piece:
            piece = piece[os.write(self._copy or 0, piece) :]

    def _write_buffered(self) -> None:
        """Writes the waiting lines to the file and shortens it where it is too long; OSError where it cannot."""
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
            # Rewrites the file with its head and newest lines; on a full disk, truncates it in place.
            self._shorten_at = self.size + TAIL_BYTES  # the next attempt, if both fail
            head = self._head
            try:
                self._rewrite(head)
            except OSError:
                newest = os.pread(self._file, UNWRITTEN_BYTES, self.size - UNWRITTEN_BYTES).partition(b"\n")[2]
                os.ftruncate(self._file, head)
                self._dropped += self.size - head - len(newest)
                self.size, self._unwritten = head, newest
            self._shorten_at = 0

    def _rewrite(self, head_bytes: int) -> None:
        """Replaces the file by its first `head_bytes` and its newest lines, to bound its size."""
        shorter = self.path.with_name(f"{self.path.name}.new")
        try:
            with self.path.open("rb") as old, open(shorter, "wb", opener=partial(os.open, mode=0o600)) as new:
                _copy_range(old.fileno(), new.write, 0, head_bytes)
                cut = self.size - TAIL_BYTES
                new.write(_CUT % (cut - head_bytes))
                old.seek(cut)
                old.readline()
                _copy_range(old.fileno(), new.write, old.tell(), self.size)
            shorter.replace(self.path)
        except OSError:
            shorter.unlink(missing_ok=True)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self.size = self.path.stat().st_size


def _copy_range(source: int, write: Callable[[bytes], object], start: int, end: int) -> None:
    """Passes bytes `start` to `end` of the file descriptor `source` to `write`, in pieces of up to 64 KiB."""
    while start < end:
        piece = os.pread(source, min(_PIECE_BYTES, end - start), start)
        if not piece:
            return
        write(piece)
        start += len(piece)


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file, those in its last 64 KiB at most; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _PIECE_BYTES, 0))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


_PIECE_BYTES = 1 << 16  # Read at once, and the longest line that is kept whole.
BATCH_S = 0.1
"""How long output of a running server is collected before it is forwarded: ten wake-ups a second at most."""
_MUCH_BYTES = 1 << 12
"""Larger output is forwarded at once: a pipe holds 64 KiB, and a server that blocks on it answers no requests."""


class OutputRelay(threading.Thread):
    """A thread that forwards one output stream to the log and to legroom's own output."""

    def __init__(
        self, source: int, target: int, log: ServerLog | None, on_line: Callable[[bytes], None] | None
    ) -> None:
        super().__init__(daemon=True)
        self.is_batching = False
        self.is_blocked = False
        """Whether it waits for the reader of legroom's output, such as a paused terminal or a pager."""
        self._source, self._target, self._log, self.on_line = source, target, log, on_line
        self._target_open = True
        self._rest = b""

    def run(self) -> None:
        """Forwards the server's output until all processes that hold the pipe's other end have ended."""
        while piece := self._read_output():
            self._log_lines(piece)
            self._forward(piece)
            if self.is_batching and len(piece) < _MUCH_BYTES:
                time.sleep(BATCH_S)
        if self._rest:
            self._log_lines(b"\n")
        os.close(self._source)

    def _read_output(self) -> bytes:
        """The server's next output, up to a fixed size; empty at its end or on an error."""
        try:
            return os.read(self._source, _PIECE_BYTES)
        except OSError:
            return b""

    def _log_lines(self, piece: bytes) -> None:
        """Passes the lines that `piece` completes to the log file and to `on_line`; an unfinished line waits."""
        whole, newline, rest = (self._rest + piece).rpartition(b"\n")
        if not newline and len(rest) <= _PIECE_BYTES:
            self._rest = rest
            return
        lines, self._rest = (whole + b"\n", rest) if newline else (rest + b"\n", b"")
        if self._log is not None:
            self._log.write(lines)
        if (on_line := self.on_line) is not None:
            for line in lines.split(b"\n")[:-1]:
                on_line(line)

    def _forward(self, piece: bytes) -> None:
        """Writes server output to legroom's own output; stops for good where nobody reads that any more."""
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
            # A full disk may have room again later; after other errors nobody reads the output any more.
            self.is_blocked = False
            self._target_open = error.errno in (errno.ENOSPC, errno.EDQUOT)
