"""A journal that buffers writes while its file cannot be written, so that watching goes on. Actions bypass the buffer:
`open_journal` raises where the journal cannot be written, because no action goes unrecorded."""

import asyncio
import contextlib
import os
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from legroom.live.journal.journal import Journal, is_damaged
from legroom.live.journal.journal_records import SQLITE_HEAD, JournalUnavailable
from legroom.live.metrics.sample import Sample

Write = Callable[[Journal], object]
_Answer = TypeVar("_Answer")
_MAX_WRITES = 2000
_MAX_SAMPLES = 50_000  # about 20 MB: forty minutes of a hundred servers
_PAUSE_S = 5.0  # between attempts, each of which may block for a second
_NEVER = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
"""SQLite errors that a retry cannot cure."""


class BufferedJournal:
    """Keeps writes in order. Methods may block, and must be called from one thread."""

    def __init__(self, path: Path, busy_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._busy_s, self._clock = path, busy_s, clock
        self._open: Journal | None = None
        self._writes: deque[Write] = deque()
        self._samples: deque[Sample] = deque()
        self._retry_s = float("-inf")
        self.problem: str | None = None
        """Why the file cannot be written now."""
        self.lost = 0
        """Writes and samples that were dropped: the buffer was full, or SQLite will never accept them."""
        self.error_text: str | None = None
        """The last error of a write that SQLite will never accept."""
        self.replaced: str | None = None
        """Why the last new file was begun, and where the one before is."""
        self._file = -1
        """The file that is open. Closing it would release SQLite's locks on it, so SQLite is closed before."""
        self._is_new = False

    @property
    def waiting(self) -> int:
        """How many writes and samples are buffered."""
        return len(self._writes) + len(self._samples)

    def write(self, write: Write) -> bool:
        """Calls `write` on the journal after all buffered writes, or buffers it; returns whether it was written."""
        self._writes.append(write)
        return self._flush()

    def add_samples(self, samples: Sequence[Sample]) -> bool:
        """Writes samples in one transaction, or buffers them. Returns whether they were written."""
        self._samples.extend(samples)
        return self._flush()

    def open_journal(self) -> Journal:
        """The journal, after all buffered writes. Raises `JournalUnavailable`."""
        self._retry_s = float("-inf")
        if not self._flush() or self._open is None:
            raise JournalUnavailable(self.problem or "the journal cannot be written")
        return self._open

    def call(self, call: Callable[[Journal], _Answer]) -> _Answer:
        """The result of a call on the journal, after all buffered writes. Raises `JournalUnavailable`."""
        journal = self.open_journal()
        try:
            return call(journal)
        except JournalUnavailable as error:
            self._move_aside_if_damaged(error)
            raise

    def maintain(self) -> None:
        """Rolls up and deletes old samples, if the journal can be written."""
        if self._flush() and self._open is not None:
            self._try_write(lambda journal: journal.maintain())

    def close(self) -> None:
        """Makes a last attempt to write what is buffered, and closes the file."""
        self._retry_s = float("-inf")
        self._flush()
        self._close_file()

    def _flush(self) -> bool:
        """Writes everything buffered, dropping the oldest above the limits; False where something stays buffered."""
        for entries, limit in ((self._samples, _MAX_SAMPLES), (self._writes, _MAX_WRITES)):
            while len(entries) > limit:
                entries.popleft()
                self.lost += 1
        if self._clock() < self._retry_s:
            return False
        self._check_file()
        if self._open is None and not self._try_write(self._reopen):
            return False
        while self._writes:
            if not self._write_or_drop(self._writes[0], 1):
                return False
            self._writes.popleft()
        if self._samples:
            samples = list(self._samples)
            if not self._write_or_drop(lambda journal: journal.add_samples(samples), len(samples)):
                return False
            self._samples.clear()
        self.problem = None
        self._is_new = False
        return True

    def _check_file(self) -> None:
        """Closes a file that was removed or replaced, and moves an overwritten one aside: SQLite notices neither."""
        if self._open is None:
            return
        try:
            is_same = os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            is_same = False
        if not is_same:
            self._close_file()
            self.replaced = f"the journal was removed or replaced: what it held is lost, begun anew at {_now_text()}"
        elif os.pread(self._file, len(SQLITE_HEAD), 0) != SQLITE_HEAD:
            self._move_file_aside()

    def _move_aside_if_damaged(self, error: JournalUnavailable) -> bool:
        """Moves a file that SQLite calls damaged away, unless it is new; returns whether it was moved."""
        return is_damaged(error.__cause__) and not self._is_new and self._move_file_aside()

    def _move_file_aside(self) -> bool:
        """Closes the journal and renames it and its WAL to `.damaged-TIME`; False where that fails."""
        self._close_file()
        moved = self._path.with_name(f"{self._path.name}.damaged-{_now_text()}")
        try:
            self._path.rename(moved)
            for ending in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    self._path.with_name(self._path.name + ending).rename(moved.with_name(moved.name + ending))
        except OSError:
            return False
        self.replaced = f"the journal was damaged: it is kept as {moved}, begun anew at {_now_text()}"
        self._is_new = True
        return True

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.close()
            os.close(self._file)
        self._open = None

    def _reopen(self, _: Journal | None = None) -> None:
        """Opens the file, or raises JournalUnavailable. The unused argument makes it a `Write`."""
        opened = Journal.open(self._path, busy_s=self._busy_s)
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            opened.close()
            raise JournalUnavailable(f"the journal {self._path} cannot be read: {error.strerror}") from error
        self._open = opened

    def _write_or_drop(self, write: Write, entries: int) -> bool:
        """Writes, or drops a write that SQLite never accepts, counting its `entries` as lost; False: retry later."""
        try:
            return self._try_write(write)
        except Exception as error:  # a bug, which must not block the writes behind it
            self.lost += entries
            self.error_text = repr(error)
            return True

    def _try_write(self, write: Callable[[Journal], object]) -> bool:
        """Whether it was written; False sets `problem` and the time to retry. Raises for what SQLite never accepts."""
        try:
            write(self._open)  # type: ignore[arg-type]  # only `_reopen` is called without one
        except JournalUnavailable as error:
            if isinstance(error.__cause__, _NEVER):
                raise error.__cause__ from None
            if self._move_aside_if_damaged(error) and self._try_write(self._reopen):
                return write == self._reopen or self._try_write(write)
            self.problem = error.message
            self._retry_s = self._clock() + _PAUSE_S
            return False
        return True


class JournalThread:
    """The thread that owns a buffered journal, for an event loop that must not block."""

    def __init__(self, path: Path) -> None:
        self.buffer = BufferedJournal(path)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def call(self, call: Callable[[Journal], _Answer], /) -> _Answer:
        """The result of a call on the journal. Raises `JournalUnavailable`."""
        return await self._run_in_thread(lambda: self.buffer.call(call))

    def write(self, write: Write) -> None:
        """Queue a write for the journal's thread; does not block."""
        with contextlib.suppress(RuntimeError):  # shutting down
            self._executor.submit(self.buffer.write, write).add_done_callback(_print_error)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Queue samples for the journal's thread; does not block."""
        # An empty write finds out whether the file is there, and whether a problem is over.
        self._executor.submit(self.buffer.add_samples, samples).add_done_callback(_print_error)

    async def maintain(self) -> None:
        """Rolls up and deletes old samples in the journal's thread."""
        await self._run_in_thread(self.buffer.maintain)

    def take_error(self) -> str | None:
        """The error of the last dropped write since the last call; None without one."""
        error_text, self.buffer.error_text = self.buffer.error_text, None
        return error_text

    async def close(self) -> None:
        """Writes what is buffered, closes the file and ends the thread."""
        await self._run_in_thread(self.buffer.close)
        self._executor.shutdown()

    async def _run_in_thread(self, work: Callable[[], _Answer]) -> _Answer:
        """Runs the work in the journal's thread and awaits its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _now_text() -> str:
    return time.strftime("%Y%m%dT%H%M%S")


def _print_error(done: Future[Any]) -> None:
    """Prints the exception of a finished background write to stderr, if it has one."""
    if not done.cancelled() and done.exception() is not None:
        print(f"legroom: the journal's thread: {done.exception()!r}", file=sys.stderr)
