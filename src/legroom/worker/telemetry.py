"""Starts the threads that report a worker's memory, and the observers that record an out-of-memory error."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from legroom.records import dataclass
from legroom.worker.recorder import BlackBoxRecorder
from legroom.worker.worker_memory import READ_INTERVAL_S, WorkerMemory, read_worker_memory

if TYPE_CHECKING:
    from legroom.worker.page import SharedGauges

PREFIX = "legroom-workers-"
_RECORD_REQUEST = "asked"


@dataclass(frozen=True)
class TelemetryFolder:
    """A folder with one file of figures per process, removed when the server ends. vLLM has no channel between its
    processes for this that all releases and executors share."""

    path: Path

    @classmethod
    def create(cls) -> TelemetryFolder:
        """A new folder for this server's figures; removes the folders of killed servers."""
        for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            owner = old.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(old, ignore_errors=True)  # another user's stays
        return cls(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")))

    def write(self, memory: tuple[WorkerMemory, ...]) -> bool:
        """Replaces this process's figures; False if the folder was removed, True even with a full disk."""
        path = self.path / f"{os.getpid()}.json"
        new = path.with_suffix(".new")
        try:
            new.write_text(json.dumps([asdict(device) for device in memory]), "utf-8")
            new.replace(path)
        except FileNotFoundError:
            return False
        except OSError:
            new.unlink(missing_ok=True)  # a full disk: the last figures expire
        return True

    def read(self, fresh_s: float) -> tuple[WorkerMemory, ...]:
        """The figures that living processes wrote within the last `fresh_s` seconds."""
        memory: list[WorkerMemory] = []
        for path in sorted(self.path.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if time.time() - path.stat().st_mtime <= fresh_s and psutil.pid_exists(int(path.stem)):
                    memory += [WorkerMemory(**fields) for fields in json.loads(path.read_text("utf-8"))]
        return tuple(memory)

    def request_record(self) -> None:
        """Asks every worker for a black box; called in a signal handler, so it makes one call and never raises."""
        with contextlib.suppress(OSError):
            (self.path / _RECORD_REQUEST).touch()

    def record_requested_s(self) -> float:
        """The Unix time when a black box was last requested; 0 if never."""
        try:
            return (self.path / _RECORD_REQUEST).stat().st_mtime
        except OSError:
            return 0.0

    def remove(self) -> None:
        """Delete the folder with the files of all workers; one that is gone is no error."""
        shutil.rmtree(self.path, ignore_errors=True)


_ERRORS = ("OutOfMemoryError", "MemoryError")
_TEXTS = re.compile(r"(?i)out of memory|not enough memory|can(?:'t|not) allocate memory|std::bad_alloc|ALLOC_FAILED")
"""Of CUDA, PyTorch's CPU allocator, the kernel, C++ and cuBLAS."""


def observe_allocator(recorder: BlackBoxRecorder) -> None:
    """Lets CUDA's out-of-memory observer call the recorder once CUDA is initialized; nothing without torch's CUDA."""
    torch = sys.modules.get("torch")
    attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
    later = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
    if attach is None or later is None:
        return  # a build for CPUs

    def attach_recorder() -> None:
        """Called by torch.cuda when it initializes CUDA; a failure is only logged."""
        try:
            attach(recorder.out_of_memory)
        except Exception as error:
            LOG.warning("legroom cannot watch for refused requests: the allocator takes no observer: %r", error)

    later(attach_recorder)


class _ErrorLog(logging.Handler):
    """Passes out-of-memory errors in vLLM's log to the recorder."""

    def __init__(self, recorder: BlackBoxRecorder) -> None:
        super().__init__(logging.ERROR)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging` for each entry from ERROR on; all but out-of-memory exceptions are ignored."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and is_out_of_memory(error):
            self._recorder.exception(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that GPU or host memory ran out, by its type or, for a RuntimeError, its text."""
    is_named = type(error).__name__ in _ERRORS
    return is_named or (isinstance(error, RuntimeError) and _TEXTS.search(str(error)[:4000]) is not None)


def observe_log(recorder: BlackBoxRecorder) -> None:
    """Makes the recorder record the out-of-memory errors that vLLM logs."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _ErrorLog) for handler in logger.handlers):
        logger.addHandler(_ErrorLog(recorder))


def handle_signal(folder: TelemetryFolder) -> None:
    """Makes SIGUSR2 request a black box of every worker; only in the main thread, and unless it has a handler."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return
    signal.signal(signal.SIGUSR2, lambda *_: folder.request_record())


LOG = logging.getLogger("legroom.worker")
FOLDER = "LEGROOM_WORKER_BOARD"
"""The folder's path: set by a server's first process, inherited by those it starts."""
SHARED_PAGE = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM where several API servers share one page."""


def start() -> None:
    """Reports this process's memory; a server's first process also exports what all of them report."""
    inherited = os.environ.get(FOLDER)
    folder = TelemetryFolder(Path(inherited)) if inherited else TelemetryFolder.create()
    if inherited is None:
        os.environ[FOLDER] = str(folder.path)
        owner = os.getpid()
        atexit.register(lambda: folder.remove() if os.getpid() == owner else None)  # not in its forks
        _start_thread(lambda: _register_collector(folder))
    recorder = BlackBoxRecorder()
    observe_allocator(recorder)
    observe_log(recorder)
    handle_signal(folder)
    # vLLM does not load plugins again in a forked process.
    os.register_at_fork(after_in_child=lambda: _start_observing(folder, recorder))
    _start_observing(folder, recorder)


def _start_observing(folder: TelemetryFolder, recorder: BlackBoxRecorder) -> None:
    """Starts the recorder and the thread that reports the worker's memory until the folder is removed."""
    recorder.begin()
    _start_thread(lambda: report_until_removed(folder, recorder))


def _start_thread(task: Callable[[], None]) -> None:
    """Runs the task in a daemon thread; its exception is only logged, as the server goes on without."""

    def until_it_fails() -> None:
        """Runs the task in the new thread; an exception is only logged."""
        try:
            task()
        except Exception as error:
            LOG.warning("memory of the workers is not reported: %r", error)

    threading.Thread(target=until_it_fails, name="legroom-worker-memory", daemon=True).start()


def _register_collector(folder: TelemetryFolder) -> None:
    """Exports the gauges once vLLM has imported prometheus_client, just before which it sets its environment."""
    while "prometheus_client" not in sys.modules:
        time.sleep(0.5)
    from prometheus_client import REGISTRY

    from legroom.worker.page import WorkerCollector

    REGISTRY.register(WorkerCollector(folder.read))


def report_until_removed(folder: TelemetryFolder, recorder: BlackBoxRecorder, every_s: float = READ_INTERVAL_S) -> None:
    """Once this process is a worker, reports memory and writes requested black boxes until the folder is removed."""
    record_requested_s = folder.record_requested_s()
    while not (memory := read_worker_memory()):
        time.sleep(every_s)
    sink: TelemetryFolder | SharedGauges = folder
    if SHARED_PAGE in os.environ:
        from legroom.worker import page

        sink = page.SharedGauges()
    while sink.write(memory):
        recorder.add_reading(memory)
        time.sleep(every_s)
        memory = read_worker_memory()
        if (requested_s := folder.record_requested_s()) > record_requested_s:
            record_requested_s = requested_s
            recorder.record_now()
