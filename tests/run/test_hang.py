"""A server that hangs is told from one that is busy and from one that nobody asks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from legroom.actions.child import Child
from legroom.process_table import cpu_ticks, descendants, exit_signal, process_title
from legroom.run.health import HANG_CHECKS, HangWatch, api_server_cpu_ticks

PATIENCE_S = 40.0
SLEEP = "import time; time.sleep(600)"


def until_true(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120.0
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Server:
    """What a watch sees of one, with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ticks: int | None = 0
        self.answers = True
        self.asked = 0

    def ask(self, patience_s: float) -> bool:
        assert 0 < patience_s <= PATIENCE_S / HANG_CHECKS
        self.asked += 1
        return self.answers

    def watch(self, patience_s: float = PATIENCE_S) -> HangWatch:
        return HangWatch(patience_s, lambda: self.ticks, self.ask, lambda: self.now_s)

    def looks(self, watch: HangWatch, count: int, ticks: int = 0) -> list[bool]:
        """So many looks, each after the server worked so much."""
        verdicts = []
        for _ in range(count):
            self.now_s += PATIENCE_S / HANG_CHECKS
            self.ticks = None if self.ticks is None else self.ticks + ticks
            verdicts.append(watch.is_hung())
        return verdicts


def test_neither_work_nor_an_answer_for_the_whole_patience_is_a_hang():
    server = Server()
    watch = server.watch()
    server.answers = False
    assert server.looks(watch, HANG_CHECKS) == [False] * (HANG_CHECKS - 1) + [True]


def test_a_busy_server_that_does_not_answer_is_left_alone_and_not_even_asked():
    server = Server()
    watch = server.watch()
    server.answers = False
    assert not any(server.looks(watch, 100, ticks=1))
    assert server.asked == 0


def test_a_server_without_work_that_answers_is_idle():
    server = Server()
    assert not any(server.looks(server.watch(), 100))
    assert server.asked == 100


def test_one_sign_of_life_begins_the_patience_anew():
    server = Server()
    watch = server.watch()
    server.answers = False
    server.looks(watch, HANG_CHECKS - 1)
    assert server.looks(watch, 1, ticks=1) == [False]
    assert server.looks(watch, HANG_CHECKS) == [False] * (HANG_CHECKS - 1) + [True]


def test_a_server_that_cannot_be_judged_is_left_alone():
    server = Server()
    watch = server.watch()
    server.answers, server.ticks = False, None
    assert not any(server.looks(watch, 100))


def test_between_two_looks_nothing_is_asked():
    server = Server()
    watch = server.watch()
    assert watch.seconds_to_next_check() == PATIENCE_S / HANG_CHECKS
    assert not watch.is_hung()
    assert server.asked == 0


def test_without_a_patience_nobody_looks():
    server = Server()
    watch = server.watch(0.0)
    assert watch.seconds_to_next_check() is None
    assert not any(server.looks(watch, 100))
    assert server.asked == 0


def test_work_is_counted_and_of_the_gone_nothing_is_known():
    before = cpu_ticks(os.getpid())
    until_true(lambda: sum(range(100_000)) > 0 and cpu_ticks(os.getpid()) != before)
    assert cpu_ticks(2**22 + 1) is None


@pytest.mark.parametrize(("name", "counts"), [("APIServer_1", True), ("EngineCore", False), ("Worker_TP0", False)])
def test_the_work_of_all_but_engines_counts_also_below_a_wrapper(name, counts):
    busy = f"exec -a VLLM::{name} {sys.executable} -c 'while True: pass'"
    child = Child(["bash", "-c", f"({busy}) & wait"], dict(os.environ))
    try:
        until_true(lambda: any(f"VLLM::{name}".encode() in process_title(pid) for pid in descendants(child.pid)))
        (server,) = [pid for pid in descendants(child.pid) if b"VLLM::" in process_title(pid)]
        used = api_server_cpu_ticks(child)
        before, worked = used(), cpu_ticks(server)
        until_true(lambda: cpu_ticks(server) > worked + 2)
        assert ((used() or 0) > (before or 0)) is counts
    finally:
        child.close()


def test_a_server_whose_output_nobody_reads_is_not_judged():
    reading, writing = os.pipe()
    child = Child(["yes"], dict(os.environ), outputs=(writing, writing))
    try:
        until_true(lambda: _is_full(writing) and child.is_blocked)
        assert api_server_cpu_ticks(child)() is None
    finally:
        os.close(reading)
        child.close()
        os.close(writing)


def _is_full(pipe: int) -> bool:
    return not select.select([], [pipe], [], 0)[1]


def test_an_engine_that_was_stopped_hangs_though_its_api_server_lives():
    server = Server()
    watch = HangWatch(PATIENCE_S, lambda: server.ticks, server.ask, lambda: server.now_s, lambda: True)
    assert server.looks(watch, HANG_CHECKS, ticks=5) == [False] * (HANG_CHECKS - 1) + [True]


def test_the_signal_that_ended_an_engine_is_known_also_after_its_parent_collected_it():
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as engine:
        handle = os.pidfd_open(engine.pid)
        engine.send_signal(signal.SIGKILL)
    ended_by = exit_signal(engine.pid, handle)
    os.close(handle)
    keeps_status = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
    assert ended_by == (signal.SIGKILL if keeps_status else None)


def test_a_stopped_engine_is_told_by_its_state():
    engine_words = f"['VLLM::EngineCore', '-c', {SLEEP!r}]"
    code = f"import subprocess, sys; subprocess.Popen({engine_words}, executable=sys.executable); {SLEEP}"
    child = Child([sys.executable, "-c", code], os.environ)
    try:
        assert child.pid is not None
        until_true(lambda: any(b"EngineCore" in process_title(pid) for pid in descendants(child.pid)))
        engine = next(pid for pid in descendants(child.pid) if b"EngineCore" in process_title(pid))
        stopped = child.has_stopped_engine
        assert not stopped()
        os.kill(engine, signal.SIGSTOP)
        until_true(stopped)
    finally:
        child.close()
