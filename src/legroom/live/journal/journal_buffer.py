"""A journal for whoever must not stop: what cannot be written now is kept, up to a bound, and written when it can.

A full disk or a lock makes `problem` say so and costs the watcher nothing but memory, of which it takes a fixed most.
Acting goes around this: `for_acting` gives the journal itself, or raises, because nothing is done unrecorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.sample import Sample

Write = Callable[[Journal], object]
_Answer = TypeVar("_Answer")
_MAX_WRITES = 2000
_MAX_SAMPLES = 50_000  # about 20 MB: forty minutes of a hundred servers
_PAUSE_S = 5.0
_BUSY_S = 1.0
_NEVER = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
"""What SQLite says of values that it will not take tomorrow either."""


class BufferedJournal:
    """Keeps writes in order. Every method may block for a moment: call it from a thread that may."""

    def __init__(
        self, path: Path | None = None, busy_s: float = _BUSY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._busy_s, self._clock = path, busy_s, clock
        self._lock = threading.Lock()
        self._open: Journal | None = None
        self._writes: deque[Write] = deque()
        self._samples: deque[Sample] = deque()
        self._try_again_s = float("-inf")
        self.problem: str | None = None
        """Why nothing can be written just now."""
        self.lost = 0
        """Writes and samples that were given up: too many were waiting, or they can never be written."""
        self.error_text: str | None = None
        """The last error of something that can never be written."""

    @property
    def waiting(self) -> int:
        """Writes and samples that are not in the file yet."""
        return len(self._writes) + len(self._samples)

    def write(self, write: Write) -> bool:
        """Writes now, after what waits, or keeps it for later. Whether it is in the file."""
        with self._lock:
            self._writes.append(write)
            self._bound()
            return self._flush()

    def add_samples(self, samples: Sequence[Sample]) -> bool:
        """The same for samples, all in one transaction."""
        with self._lock:
            self._samples.extend(samples)
            self._bound()
            return self._flush()

    def open_journal(self) -> Journal:
        """The journal, with everything written that was waiting. Raises `JournalUnavailable` otherwise."""
        with self._lock:
            self._try_again_s = float("-inf")
            if not self._flush() or self._open is None:
                raise JournalUnavailable(self.problem or "the journal cannot be written")
            return self._open

    def maintain(self) -> None:
        """Packs and forgets old samples, when the journal can be written."""
        with self._lock:
            if self._flush() and self._open is not None:
                self._guarded(lambda journal: journal.maintain())

    def close(self) -> None:
        """A last try to write what waits."""
        with self._lock:
            self._try_again_s = float("-inf")
            self._flush()
            if self._open is not None:
                self._open.close()
                self._open = None

    def _flush(self) -> bool:
        if self._clock() < self._try_again_s:
            return False
        if self._open is None and not self._guarded(self._reopen):
            return False
        while self._writes:
            if not self._written(self._writes[0], 1):
                return False
            self._writes.popleft()
        if self._samples:
            samples = list(self._samples)
            if not self._written(lambda journal: journal.add_samples(samples), len(samples)):
                return False
            self._samples.clear()
        self.problem = None
        return True

    def _reopen(self, _: Journal | None = None) -> None:
        self._open = Journal.open(self._path, busy_s=self._busy_s)

    def _written(self, write: Write, entries: int) -> bool:
        """Whether it is done with: in the file, or given up, so that what can never be written holds up nothing."""
        try:
            return self._guarded(write)
        except Exception as error:  # a mistake of legroom's own
            self.lost += entries
            self.error_text = repr(error)
            return True

    def _guarded(self, write: Callable[[Journal], object]) -> bool:
        try:
            write(self._open)  # type: ignore[arg-type]  # `_reopen` alone is called without one
        except JournalUnavailable as error:
            if isinstance(error.__cause__, _NEVER):
                raise error.__cause__ from None
            self.problem = error.message
            self._try_again_s = self._clock() + _PAUSE_S
            return False
        return True

    def _bound(self) -> None:
        """The oldest samples go first; of incidents the newest stay, because they are about now."""
        while len(self._samples) > _MAX_SAMPLES:
            self._samples.popleft()
            self.lost += 1
        while len(self._writes) > _MAX_WRITES:
            self._writes.popleft()
            self.lost += 1


class JournalThread:
    """The one thread that owns a journal, for an event loop that must not wait for it."""

    def __init__(self, path: Path) -> None:
        self._journal = BufferedJournal(path)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @property
    def problem(self) -> str | None:
        """Why nothing can be written just now."""
        return self._journal.problem

    @property
    def waiting(self) -> int:
        """Writes and samples that are not in the file yet."""
        return self._journal.waiting

    @property
    def lost(self) -> int:
        """Writes and samples that were given up."""
        return self._journal.lost

    async def call(self, call: Callable[[Journal], _Answer], /) -> _Answer:
        """The answer of a call on the journal. Raises `JournalUnavailable`."""
        return await self._run(lambda: call(self._journal.open_journal()))

    def write(self, write: Write) -> None:
        """Begins a write, and does not wait for it."""
        with contextlib.suppress(RuntimeError):  # shutting down
            self._executor.submit(self._journal.write, write).add_done_callback(_report_raised)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """The same for samples."""
        if samples or self.problem is not None:  # an empty write finds out whether it can be written again
            self._executor.submit(self._journal.add_samples, samples).add_done_callback(_report_raised)

    async def maintain(self) -> None:
        await self._run(self._journal.maintain)

    def take_error(self) -> str | None:
        """The error of an entry that was given up since this was last asked."""
        error_text, self._journal.error_text = self._journal.error_text, None
        return error_text

    async def close(self) -> None:
        """A last try to write what waits."""
        await self._run(self._journal.close)
        self._executor.shutdown()

    async def _run(self, work: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _report_raised(done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        print(f"legroom: the journal's thread: {done.exception()!r}", file=sys.stderr)
