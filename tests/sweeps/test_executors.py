"""Where sweeps run: what every executor promises, and what it says where it cannot."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

from legroom.cli.main import main
from legroom.errors import UNREACHABLE, LegroomError
from legroom.sweeps import ProcessExecutor
from legroom.sweeps.ray_cluster import RayExecutor


def _times(factor: int, number: int) -> int:
    return factor * number


def _process(_shared: None, seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def _wait_for_another(begun: str, number: int) -> int:
    """The process, once two have begun; item 0 of two ends a second after the other has begun."""
    Path(begun, str(os.getpid())).touch()
    end_s = time.monotonic() + 90
    while len(list(Path(begun).iterdir())) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(0 if number else 1)
    return os.getpid()


def _refuse(_shared: None, number: int) -> int:
    raise LegroomError(f"number {number} is wrong")


@pytest.mark.parametrize("workers", [1, 2, None])
def test_every_item_is_done_once_and_known_by_its_number(workers: int | None) -> None:
    assert sorted(ProcessExecutor(workers).run(_times, 3, range(20))) == [(n, 3 * n) for n in range(20)]


def test_nothing_to_do_is_done_at_once() -> None:
    assert list(ProcessExecutor(4).run(_times, 3, [])) == []


def test_two_processes_share_the_work_and_what_is_quick_comes_before_what_is_slow(tmp_path: Path) -> None:
    first, second = ProcessExecutor(2).run(_wait_for_another, str(tmp_path), range(2))
    assert first[1] != second[1]
    assert (first[0], second[0]) == (1, 0)


def test_there_is_a_process_a_core_where_nobody_says_how_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    results = ProcessExecutor().run(_wait_for_another, str(tmp_path), range(2))
    assert len({process for _, process in results} - {os.getpid()}) == 2


def test_an_error_of_the_work_ends_the_sweep() -> None:
    with pytest.raises(LegroomError, match="is wrong"):
        list(ProcessExecutor(2).run(_refuse, None, [1, 2, 3]))


def test_a_sweep_that_is_closed_leaves_what_was_not_begun() -> None:
    began_s = time.monotonic()
    results = ProcessExecutor(2).run(_process, None, [0.1] * 2400)
    next(results)
    results.close()
    assert time.monotonic() - began_s < 60


def test_an_address_where_nobody_answers_is_named_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(LegroomError, match=f"could not join the Ray cluster at {address}") as raised:
            list(RayExecutor(address).run(_times, 3, [1]))
    assert raised.value.exit_code == UNREACHABLE


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LegroomError) as raised:
        list(RayExecutor().run(_times, 3, [1]))
    assert raised.value.hint == "pip install 'legroom[ray]'"


def test_no_worker_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "llama-3.1-8b", "--gpu", "l4", "--workers", "0"]) == 2
    assert "--workers 0" in capsys.readouterr().err


def test_a_matrix_is_the_same_in_one_process_and_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["size", "llama-3.1-8b", "qwen3-8b", "--gpu", "h100,l4", "--matrix", "--json", "--workers"]
    texts = []
    for workers in ("1", "2"):
        assert main([*words, workers]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def _interrupted(count: int) -> int:
    """A sweep that gets a Ctrl-C in each of so many calls of its pool: the exit code, and 1 where a call was broken."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    submit, whole = ProcessPoolExecutor.submit, []

    def interrupt(pool: ProcessPoolExecutor, *words: Any) -> Any:
        future = submit(pool, *words)
        os.kill(os.getpid(), signal.SIGINT)
        whole.append(future)
        return future

    ProcessPoolExecutor.submit = interrupt  # type: ignore[method-assign, assignment]
    try:
        list(ProcessExecutor(2).run(_process, None, [600.0] * count))
    except KeyboardInterrupt:
        is_restored = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return 130 if is_restored and len(whole) == count and not multiprocessing.active_children() else 1
    return 0


def test_ctrl_c_ends_a_sweep_but_never_inside_a_call_of_its_pool() -> None:
    assert Forked(lambda: _interrupted(20)).wait(60) == 130
