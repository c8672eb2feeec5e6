"""Who reports and who shows: the workers report, and the page that vLLM serves shows it."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from legroom.records import dataclass
from legroom.worker.recorder import BlackBoxRecorder
from legroom.worker.worker_memory import WorkerMemory, read

if TYPE_CHECKING:
    from legroom.worker.page import SharedGauges

PREFIX = "legroom-workers-"
_ASKED = "asked"


@dataclass(frozen=True)
class Board:
    """A folder that lasts as long as the server, with a file for each process.

    Processes of vLLM have no channel of their own for this, and come and go in ways that differ by release and
    executor.
    """

    folder: Path

    @classmethod
    def create(cls) -> Board:
        """A new one for this server; those of servers that were killed are taken away."""
        for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            owner = old.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(old, ignore_errors=True)  # another user's stays
        return cls(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")))

    def write(self, memory: tuple[WorkerMemory, ...]) -> bool:
        """This process's figures in place of its last; False where the server took the board away."""
        path = self.folder / f"{os.getpid()}.json"
        new = path.with_suffix(".new")
        try:
            new.write_text(json.dumps([asdict(device) for device in memory]), "utf-8")
            new.replace(path)
        except FileNotFoundError:
            return False
        except OSError:
            new.unlink(missing_ok=True)  # a full disk: the last figures grow old by themselves
        return True

    def read(self, fresh_s: float) -> tuple[WorkerMemory, ...]:
        """What the living processes wrote within that time."""
        memory: list[WorkerMemory] = []
        for path in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if time.time() - path.stat().st_mtime <= fresh_s and psutil.pid_exists(int(path.stem)):
                    memory += [WorkerMemory(**fields) for fields in json.loads(path.read_text("utf-8"))]
        return tuple(memory)

    def request_record(self) -> None:
        """Ask every worker for a record. Called by a handler of signals, so it is one call and raises nothing."""
        with contextlib.suppress(OSError):
            (self.folder / _ASKED).touch()

    def record_requested_s(self) -> float:
        """When a record was last asked for; 0 if never."""
        try:
            return (self.folder / _ASKED).stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


_ERRORS = ("OutOfMemoryError", "MemoryError")
_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
)
"""Of CUDA, PyTorch's CPU allocator, the kernel, C++ and cuBLAS."""


def observe_allocator(recorder: BlackBoxRecorder) -> None:
    """At once where CUDA is up, else in the moment in which it comes up: the first weights may be too many."""
    torch = sys.modules.get("torch")
    attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
    later = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if attach is None or later is None:
        return  # a build for CPUs
    later(lambda: _attach(attach, recorder))


def _attach(attach: Any, recorder: BlackBoxRecorder) -> None:
    try:
        attach(recorder.out_of_memory)
    except Exception as error:
        logging.getLogger("legroom.worker").warning(
            "legroom cannot watch for refused requests: the allocator takes no observer: %r", error
        )


class _ErrorLog(logging.Handler):
    """Sees vLLM's own log entries; writes none."""

    def __init__(self, recorder: BlackBoxRecorder) -> None:
        super().__init__(logging.ERROR)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and is_out_of_memory(error):
            self._recorder.exception(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory that could not be had, by its type or, of others' libraries, by its text."""
    if type(error).__name__ in _ERRORS:
        return True
    text = str(error)[:4000].lower()
    return isinstance(error, RuntimeError) and any(words.lower() in text for words in _TEXTS)


def observe_log(recorder: BlackBoxRecorder) -> None:
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _ErrorLog) for handler in logger.handlers):
        logger.addHandler(_ErrorLog(recorder))


def handle_signal(board: Board) -> None:
    """SIGUSR2 asks every worker of the server for a record. Somebody else's handler stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return
    signal.signal(signal.SIGUSR2, lambda *_: board.request_record())


LOG = logging.getLogger("legroom.worker")
BOARD = "LEGROOM_WORKER_BOARD"
"""Where the board is: set by a server's first process, inherited by those it starts."""
SHARED_PAGE = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM where several API servers share one page."""
READ_INTERVAL_S = 5.0


def join() -> None:
    """Begin to report in this process; the first process of a server also shows what all report."""
    folder = os.environ.get(BOARD)
    board = Board(Path(folder)) if folder else Board.create()
    if folder is None:
        os.environ[BOARD] = str(board.folder)
        atexit.register(_remove, board, os.getpid())
        _start(lambda: _register_collector(board))
    recorder = BlackBoxRecorder()
    observe_allocator(recorder)
    observe_log(recorder)
    handle_signal(board)
    # A process that is forked has loaded its plugins already, so nobody calls this again in it.
    os.register_at_fork(after_in_child=lambda: _begin(board, recorder))
    _begin(board, recorder)


def _begin(board: Board, recorder: BlackBoxRecorder) -> None:
    recorder.begin()
    _start(lambda: report(board, recorder))


def _remove(board: Board, owner: int) -> None:
    if os.getpid() == owner:
        board.remove()


def _start(task: Callable[[], None]) -> None:
    def until_it_fails() -> None:
        try:
            task()
        except Exception as error:  # the server goes on without
            LOG.warning("memory of the workers is not reported: %r", error)

    threading.Thread(target=until_it_fails, name="legroom-worker-memory", daemon=True).start()


def _register_collector(board: Board, every_s: float = 0.5) -> None:
    """Not before vLLM has loaded prometheus_client itself: how it counts is settled when it is loaded, and vLLM says
    how just before."""
    while "prometheus_client" not in sys.modules:
        time.sleep(every_s)
    from legroom.worker import page

    page.show(board)


def report(board: Board, recorder: BlackBoxRecorder, every_s: float = READ_INTERVAL_S) -> None:
    """What this process holds, again and again from when it is a worker, until the server takes the board away."""
    record_requested_s = board.record_requested_s()
    while not (memory := read()):
        time.sleep(every_s)
    to = _shared_gauges() if SHARED_PAGE in os.environ else board
    while to.write(memory):
        recorder.add_reading(memory)
        time.sleep(every_s)
        memory = read()
        if (requested_s := board.record_requested_s()) > record_requested_s:
            record_requested_s = requested_s
            recorder.record_now()


def _shared_gauges() -> SharedGauges:
    from legroom.worker import page

    return page.SharedGauges()
