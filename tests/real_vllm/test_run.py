"""`legroom run` on a real vLLM: failed starts are mended, a dead engine is restarted, SIGTERM lets requests finish, and
a Ctrl-C answers every client at once."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SERVE_ENV, serve_words, write_model

from legroom.live.journal.journal import Journal
from legroom.process_table import descendants, process_start_ticks

PATIENCE_S = 600.0


class Run:
    """A server below `legroom run`, and what legroom said of it."""

    def __init__(self, python: Path, folder: Path, *flags: str, own: tuple[str, ...] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.home, self.err, self.model = folder / "home", folder / "err", write_model(folder / "tiny")
        words = [sys.executable, "-m", "legroom", "run", "--restart-delay", "0", *own, "--"]
        words += serve_words(python, self.model, self.port, *flags)
        env = {**os.environ, **SERVE_ENV, "LEGROOM_HOME": str(self.home)}
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=err, env=env)

    def lines(self, text: str) -> list[str]:
        said = self.err.read_text("utf-8", "replace").splitlines()
        return [line for line in said if line.startswith("legroom: ") and text in line]

    def until_said(self, text: str, times: int = 1) -> str:
        self.until(lambda: len(self.lines(text)) >= times)
        return self.lines(text)[times - 1]

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, self.err.read_text("utf-8", "replace")[-2000:]
            assert time.monotonic() < end, self.err.read_text("utf-8", "replace")[-2000:]
            time.sleep(0.05)

    def file(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / f"runs/{self.port}.json").read_text())
        return found

    def engine(self) -> int:
        """The engine core, by the title that it gives itself: the resource tracker is older."""
        below = descendants(self.file()["child_pid"])
        return next(pid for pid in below if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stream(self, max_tokens: int, begun: threading.Event) -> int:
        """One request; how many tokens its answer had in the end."""
        wish = {"model": str(self.model), "prompt": "x" * 32, "max_tokens": max_tokens, "ignore_eos": True}
        wish |= {"stream": True, "stream_options": {"include_usage": True}}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        asked = urllib.request.Request(url, json.dumps(wish).encode(), {"content-type": "application/json"})
        tokens = 0
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            for line in answer:
                begun.set()
                if b'"completion_tokens"' in line:
                    tokens = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return tokens

    def incident_kinds(self) -> list[str]:
        with Journal.open(self.home / "journal.db") as journal:
            return [incident.kind for incident in journal.incidents()]


@pytest.fixture(scope="module")
def held(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A pool too small for the length, and a flag that is gone: two failures, then it serves."""
    flags = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "2M", "--swap-space", "4")
    run = Run(vllm_python, tmp_path_factory.mktemp("run"), *flags)
    try:
        run.until_said("serving at")
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def test_a_removed_flag_and_a_small_pool_are_mended_one_after_the_other(held):
    first, second = held.lines("legroom: try ")
    assert "--swap-space 4 taken out" in first
    assert "Changed: --max-model-len 1920 (was 2048)" in second
    assert held.lines("verified: ")


def test_what_vllm_prints_is_what_was_expected(held):
    assert "exactly as planned" in held.lines("vLLM says")[-1]


def test_a_dead_engine_is_an_incident_and_a_restart(held):
    engine = held.engine()
    os.kill(engine, signal.SIGKILL)
    held.until_said("serving at", times=2)
    assert held.lines("its engine died")
    assert held.incident_kinds()[0] == "died_serving"
    assert process_start_ticks(engine) is None
    # The API server may collect the status of its child before `run` can read it.
    died = rf"EngineCore \(pid {engine}\) (died of SIGKILL, sent by somebody|ended; its parent collected)"
    assert re.search(died, held.lines("diagnosis: ")[-1])


def test_a_stopped_engine_is_not_drained_and_its_client_is_answered(held):
    outcomes: list[object] = []
    begun = threading.Event()

    def ask() -> None:
        try:
            held.stream(1800, begun)
        except OSError as error:  # HTTPError is one
            outcomes.append(error)
        else:
            outcomes.append("ended")

    client = threading.Thread(target=ask)
    client.start()
    assert begun.wait(PATIENCE_S)
    os.kill(held.engine(), signal.SIGSTOP)
    held.process.send_signal(signal.SIGHUP)
    held.until_said("SIGHUP: an engine is stopped (SIGSTOP)")
    client.join(20.0)  # a drain would take 75 s
    assert outcomes and "Disconnected" not in repr(outcomes)
    held.until_said("serving at", times=3)


def test_sigterm_lets_requests_finish_and_leaves_nothing(held):
    answers: list[int] = []
    begun = [threading.Event() for _ in range(4)]
    clients = [threading.Thread(target=lambda one=one: answers.append(held.stream(400, one))) for one in begun]
    for client in clients:
        client.start()
    assert all(one.wait(PATIENCE_S) for one in begun)
    keeper = held.file()["keeper_pid"]
    pids = [keeper, *descendants(keeper)]
    held.process.send_signal(signal.SIGTERM)
    assert held.process.wait(PATIENCE_S) == 0
    for client in clients:
        client.join()
    assert answers == [400] * 4
    assert not any(process_start_ticks(pid) for pid in pids)


def test_one_ctrl_c_under_load_answers_every_client_and_ends(vllm_python, tmp_path):
    # How soon, and with several API servers and engines: bench/run_interrupt.py.
    flags = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "64M")
    run = Run(vllm_python, tmp_path, *flags, own=("--no-verify",))
    try:
        run.until_said("serving at")
        begun = [threading.Event() for _ in range(8)]
        tokens: list[int] = []
        clients = [
            threading.Thread(target=lambda event=event: tokens.append(run.stream(1500, event))) for event in begun
        ]
        for client in clients:
            client.start()
        assert all(event.wait(PATIENCE_S) for event in begun)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(PATIENCE_S)
        for client in clients:
            client.join()
        assert tokens == [0] * 8  # each stream was ended with an error event: one that breaks off raises
    finally:
        run.process.kill()
        run.process.wait()
