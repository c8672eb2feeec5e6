"""Who reports and who shows: the workers report, and the page that vLLM serves shows it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.worker import hooks
from legroom.worker.board import Board
from legroom.worker.memory import read
from legroom.worker.recorder import BlackBoxRecorder

if TYPE_CHECKING:
    from legroom.worker.page import SharedGauges

LOG = logging.getLogger("legroom.worker")
BOARD = "LEGROOM_WORKER_BOARD"
"""Where the board is: set by a server's first process, inherited by those it starts."""
SHARED_PAGE = "PROMETHEUS_MULTIPROC_DIR"
"""Set by vLLM where several API servers share one page."""
EVERY_S = 5.0


def join() -> None:
    """Begin to report in this process; the first process of a server also shows what all report."""
    folder = os.environ.get(BOARD)
    board = Board(Path(folder)) if folder else Board.create()
    if folder is None:
        os.environ[BOARD] = str(board.folder)
        atexit.register(_remove, board, os.getpid())
        _start(lambda: _show_when_there_is_a_page(board))
    recorder = BlackBoxRecorder()
    hooks.attach_to_allocator(recorder)
    hooks.listen_to_log(recorder)
    hooks.listen_to_signal(board)
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


def _show_when_there_is_a_page(board: Board, every_s: float = 0.5) -> None:
    """Not before vLLM has loaded prometheus_client itself: how it counts is settled when it is loaded, and vLLM says
    how just before."""
    while "prometheus_client" not in sys.modules:
        time.sleep(every_s)
    from legroom.worker import page

    page.show(board)


def report(board: Board, recorder: BlackBoxRecorder, every_s: float = EVERY_S) -> None:
    """What this process holds, again and again from when it is a worker, until the server takes the board away."""
    asked_s = board.asked_s()
    while not (memory := read()):
        time.sleep(every_s)
    to = _shared_gauges() if SHARED_PAGE in os.environ else board
    while to.write(memory):
        recorder.keep(memory)
        time.sleep(every_s)
        memory = read()
        if (now_asked_s := board.asked_s()) > asked_s:
            asked_s = now_asked_s
            recorder.asked()


def _shared_gauges() -> SharedGauges:
    from legroom.worker import page

    return page.SharedGauges()
