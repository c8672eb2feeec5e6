"""How the black box learns that memory ran out: from PyTorch's allocator itself, and from what vLLM logs.

PyTorch tells an observer of every request that it refuses, in the thread that asked and before the error is raised.
Memory that others ask for (cuBLAS, NCCL, the host's) is not seen there, but vLLM logs every error that ends a step.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import Any

from legroom.worker.board import Board
from legroom.worker.recorder import BlackBoxRecorder

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


def attach_to_allocator(recorder: BlackBoxRecorder) -> None:
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
        if error is not None and says_out_of_memory(error):
            self._recorder.exception(error)


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory that could not be had, by its type or, of others' libraries, by its text."""
    if type(error).__name__ in _ERRORS:
        return True
    text = str(error)[:4000].lower()
    return isinstance(error, RuntimeError) and any(words.lower() in text for words in _TEXTS)


def listen_to_log(recorder: BlackBoxRecorder) -> None:
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _ErrorLog) for handler in logger.handlers):
        logger.addHandler(_ErrorLog(recorder))


def listen_to_signal(board: Board) -> None:
    """SIGUSR2 asks every worker of the server for a record. Somebody else's handler stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return
    signal.signal(signal.SIGUSR2, lambda *_: board.ask())
