"""`legroom run` and an acting sidecar at the same server: one acts, the other knows."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Forked, take_streams
from free_ports import free_port
from held_run import Run, until

from legroom.live.journal.journal import Journal
from legroom.live.run_record import run_under_way
from legroom.sidecar.sidecar import run_sidecar
from legroom.sidecar.watch_config import read_config

CONFIG = """
interval_s = 0.05
port = {own}
journal = {journal}
act = ["notify", "restart"]
token = "act-token"

[limits]
per_hour = 3600
per_day = 86400
first_pause_s = 0
restart_deadline_s = 20

[thresholds]
unreachable_hold = {{ samples = 2, seconds = 0.1 }}
calm = {{ samples = 1, seconds = 0.0 }}
crash_restarts = {crashes}

[[servers]]
url = "http://127.0.0.1:{port}"
platform = "run"
"""
"""A sidecar that is as hasty as can be: two looks without an answer, and it would restart."""


@pytest.fixture
def hasty_sidecar(tmp_path: Path, monkeypatch) -> Iterator[Callable[[Run], Path]]:
    sidecars: list[Forked] = []

    def start(supervised: Run, crash_restarts: int = 1000000, behind: int = 0) -> Path:
        own = free_port()
        monkeypatch.setenv("LEGROOM_HOME", str(supervised.home))
        config, said = tmp_path / "watch.toml", tmp_path / "sidecar"
        journal = json.dumps(str(tmp_path / "sidecar.db"))
        config.write_text(
            CONFIG.format(own=own, port=behind or supervised.port, journal=journal, crashes=crash_restarts)
        )

        def work() -> int:
            take_streams(said, said)
            return run_sidecar(read_config(config))

        sidecars.append(Forked(work))
        until(lambda: said.exists() and "watching 1 server" in said.read_text())
        return said

    start.sidecars = sidecars  # type: ignore[attr-defined]
    yield start
    for sidecar in sidecars:
        sidecar.kill()
        sidecar.wait()


def page(url: urllib.request.Request) -> bytes:
    """What is answered; nothing where nobody listens yet, or it is refused."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
        return bytes(answer.read())
    return b""


def wait_until_seen(supervised: Run, said: Path, behind: int = 0) -> None:
    """Waits until the sidecar has journalled a sample of the present server."""
    server = f"http://127.0.0.1:{behind or supervised.port}"
    shown = page(urllib.request.Request(f"{server}/metrics")).decode()
    started_s = float(shown.partition("\nprocess_start_time_seconds ")[2].split()[0])

    def is_seen() -> bool:
        with Journal.open(said.parent / "sidecar.db") as journal:
            return any(point.process_start_s == started_s for point in journal.samples(server, 0.0))

    until(is_seen)


def starts(supervised: Run) -> int:
    return supervised.out.read_text().count("Application startup complete")


def test_a_crash_is_restarted_by_the_run_and_by_nobody_else(run, hasty_sidecar):
    supervised = run("--no-verify", "--restarts", "100", STAND_IN_START_S="0.4")
    supervised.serving()
    said = hasty_sidecar(supervised)
    for kills in range(1, 6):
        os.kill(random.Random(kills).choice([supervised.file()["child_pid"], supervised.engine()]), signal.SIGKILL)
        supervised.serving(times=kills + 1)
    assert starts(supervised) == 6
    assert "no incident" in said.read_text()  # at two looks, and the start takes eight
    assert "does not answer" not in said.read_text() and "restart:" not in said.read_text()


def test_a_planned_restart_is_no_incident_of_the_sidecars(run, hasty_sidecar):
    supervised = run("--no-verify", STAND_IN_START_S="0.4")
    supervised.serving()
    said = hasty_sidecar(supervised)
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=2)
    assert starts(supervised) == 2
    assert "does not answer" not in said.read_text()


@pytest.mark.parametrize("by_proxy", [False, True])
def test_a_restart_that_was_asked_for_is_no_crash(run, hasty_sidecar, by_proxy):
    supervised = run("--no-verify", "--restarts", "100", STAND_IN_START_S="0.8")  # starts are a second apart
    supervised.serving()
    with contextlib.ExitStack() as stack:
        behind = 0
        if by_proxy:
            words = ["guard", "--upstream", f"http://127.0.0.1:{supervised.port}", "--port", "0"]
            guard = subprocess.Popen(
                [sys.executable, "-m", "legroom", *words],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "LEGROOM_HOME": str(supervised.home)},
            )
            stack.enter_context(guard)
            stack.callback(guard.kill)
            assert guard.stderr is not None
            behind = int(guard.stderr.readline().rpartition(":")[2])
        said = hasty_sidecar(supervised, 1, behind)
        wait_until_seen(supervised, said, behind)
        supervised.process.send_signal(signal.SIGHUP)
        supervised.serving(times=2)
        wait_until_seen(supervised, said, behind)
        os.kill(supervised.file()["child_pid"], signal.SIGKILL)
        until(lambda: "The server crashes and starts over: 1 starts" in said.read_text())
    lines = said.read_text()
    assert lines.index("no incident") < lines.index("crashes and starts over")
    assert "does not answer:" not in lines


def test_a_sidecar_that_was_killed_during_its_restart_waits_for_the_run(run, hasty_sidecar):
    supervised = run("--no-verify", STAND_IN_START_S="1")
    supervised.serving()
    said = hasty_sidecar(supervised)
    asked = {"action": "restart", "server": f"http://127.0.0.1:{supervised.port}"}
    own = tomllib.loads((said.parent / "watch.toml").read_text())["port"]
    headers = {"Authorization": "Bearer act-token", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{own}/act", json.dumps(asked).encode(), headers)
    until(lambda: b'"accepted": true' in page(request))
    supervised.said("SIGHUP: draining")
    hasty_sidecar.sidecars[0].kill()
    hasty_sidecar.sidecars[0].wait()
    said.unlink()
    hasty_sidecar(supervised)
    supervised.serving(times=2)
    until(lambda: "the restart, which had happened" in said.read_text())
    assert starts(supervised) == 2
    assert "does not answer" not in said.read_text() and "failed" not in said.read_text()


def test_a_run_that_has_given_up_is_the_sidecars_to_report(run, hasty_sidecar):
    supervised = run("--no-verify", "--on-crash", "exit")
    supervised.serving()
    said = hasty_sidecar(supervised)
    os.kill(supervised.file()["child_pid"], signal.SIGKILL)
    supervised.process.wait(120)
    until(lambda: "The server does not answer" in said.read_text())


def test_a_sighup_while_it_starts_does_not_start_it_twice(run):
    supervised = run("--no-verify", STAND_IN_START_S="2")
    until((supervised.home / f"runs/{supervised.port}.json").exists)
    supervised.process.send_signal(signal.SIGHUP)
    supervised.said("SIGHUP: it is starting already")
    supervised.serving()
    assert starts(supervised) == 1


def test_a_sighup_while_it_starts_takes_what_was_left_for_it(run):
    supervised = run("--no-verify", STAND_IN_START_S="2")
    until((supervised.home / f"runs/{supervised.port}.json").exists)
    left = {"flags": {"--max-model-len": "512"}, "env": {}}
    (supervised.home / f"runs/{supervised.port}.flags.json").write_text(json.dumps(left))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.said("restart with: ")
    supervised.serving()
    assert supervised.file()["command"][-2:] == ["--max-model-len", "512"]


def record(home: Path, port: int, state: str, pid: int, **more: int | list[int]) -> None:
    (home / "runs").mkdir(parents=True, exist_ok=True)
    (home / f"runs/{port}.json").write_text(json.dumps({"pid": pid, "state": state, **more}))


@pytest.mark.parametrize(
    ("state", "says"),
    [("starting", True), ("restarting", True), ("stopping", True), ("serving", False), ("unheard of", False)],
)
def test_what_a_run_is_about_to_do_is_read_by_the_address_of_its_server(tmp_path, state, says):
    record(tmp_path, 8000, state, os.getpid())
    assert (run_under_way("http://127.0.0.1:8000", tmp_path) is not None) == says
    assert run_under_way("http://127.0.0.1:8001", tmp_path) is None
    assert run_under_way("http://10.1.2.3:8000", tmp_path) is None


def test_a_run_whose_server_has_just_died_is_about_to_act(tmp_path):
    record(tmp_path, 8000, "serving", os.getpid(), child_pid=2**22 + 1)
    assert run_under_way("http://127.0.0.1:8000", tmp_path) is not None


def test_a_server_that_has_lost_an_engine_core_is_about_to_be_restarted(tmp_path):
    engines = {"child_pid": os.getpid(), "engine_pids": [os.getppid(), 2**22 + 1]}
    record(tmp_path, 8000, "serving", os.getpid(), **engines)
    assert run_under_way("http://127.0.0.1:8000", tmp_path) is not None


def test_a_run_that_is_gone_does_nothing_any_more(tmp_path):
    record(tmp_path, 8000, "starting", 2**22 + 1)
    assert run_under_way("http://127.0.0.1:8000", tmp_path) is None
