"""What a server prints, kept in one file of bounded size: its start-up whole, then the newest of what followed."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

HEAD_BYTES = 2 << 20
"""At most this much of a start-up is kept from its beginning on; a start-up prints a hundred KiB."""
TAIL_BYTES = 4 << 20
"""What stays of the rest when the file is made shorter, which happens when twice as much has come."""
_CUT = b"[legroom left out %d bytes here]\n"


class KeptLog:
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
        """Keep whole lines."""
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
