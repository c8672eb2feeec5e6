"""A child and all that comes from it: passed-on output, told ends, and nothing left behind whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from legroom.actions.child import Child
from legroom.actions.keeper import send_signal
from legroom.actions.server_log import ServerLog, last_lines
from legroom.errors import LegroomError
from legroom.process_table import descendants, process_start_ticks

SLEEP = "import time; time.sleep(600)"
FAMILY = f"""
import os, subprocess, sys, time
quiet = dict(start_new_session=True)
core = subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time;"
    "worker = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True);"
    "print(worker.pid, flush=True); time.sleep(600)"], **quiet)
print(core.pid, flush=True)
time.sleep(600)
"""
"""A server, its core in a session of its own, and a worker of that in another: nothing but descent ties them."""


def until(true: Callable[[], object], patience_s: float = 90.0) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    return process_start_ticks(pid) is not None


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(code: str, **options: object) -> Child:
        out = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        options.setdefault("outputs", (out, out))
        children.append(Child([sys.executable, "-c", code], os.environ, **options))
        return children[-1]

    yield start
    for child in children:
        child.close()


def pids_printed(path: Path, count: int) -> list[int]:
    assert until(lambda: path.exists() and len(path.read_text().split()) >= count)
    return [int(word) for word in path.read_text().split()]


def test_output_goes_to_the_streams_it_was_printed_to(launch, tmp_path):
    out, err = (os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY) for name in ("1", "2"))
    child = launch("import sys; print('to out'); print('to err', file=sys.stderr)", outputs=(out, err))
    assert child.wait_gone(20)
    child.close()
    assert ((tmp_path / "1").read_text(), (tmp_path / "2").read_text()) == ("to out\n", "to err\n")


def test_lines_are_seen_and_kept_as_they_come(launch, tmp_path):
    seen: list[bytes] = []
    log = ServerLog(tmp_path / "log")
    child = launch("print('one'); print('two', end='')", log=log, on_line=seen.append)
    child.wait_gone(20)
    child.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert seen == [b"one", b"two"]


def test_the_exit_code_is_the_servers(launch):
    child = launch("raise SystemExit(7)")
    assert child.wait_gone(20)
    assert child.exit_code == 7


def test_a_killed_server_has_the_code_that_a_shell_gives(launch):
    child = launch("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert child.wait_gone(20)
    assert child.exit_code == 137


def test_signals_reach_the_server(launch, tmp_path):
    child = launch("import signal, time; signal.signal(15, lambda *_: exit(3)); print('1', flush=True); time.sleep(60)")
    pids_printed(tmp_path / "out", 1)
    child.send(signal.SIGTERM)
    assert child.wait_gone(20)
    assert child.exit_code == 3


def process(*below: str) -> str:
    """Code of a process that starts others with titles of vLLM's, prints their pids, and stays."""
    starts = "".join(
        f"print(subprocess.Popen([{title!r}, '-c', {code!r}], executable={sys.executable!r}).pid, flush=True)\n"
        for title, code in zip(below[::2], below[1::2], strict=True)
    )
    return f"import subprocess, time\n{starts}time.sleep(600)"


def test_the_engine_of_a_single_api_server_is_killed_with_its_workers(launch, tmp_path):
    engine = process("VLLM::Worker_TP0", SLEEP)
    child = launch(process("VLLM::EngineCore", engine, "tracker", SLEEP))
    pids = pids_printed(tmp_path / "out", 3)
    assert child.kill_engines()
    assert until(lambda: sum(map(alive, pids)) == 1)
    assert not child.gone and not child.kill_engines()


def test_an_engine_of_several_api_servers_loses_its_workers_so_that_it_can_tell_them(launch, tmp_path):
    engine = process("VLLM::Worker_TP0", SLEEP)
    child = launch(process("VLLM::EngineCore_DP0", engine, "VLLM::APIServer_0", SLEEP))
    pids = pids_printed(tmp_path / "out", 3)
    assert child.kill_engines()
    assert until(lambda: sum(map(alive, pids)) == 2)


def test_the_coordinator_of_data_parallelism_stays_until_the_api_servers_have_been_told(launch, tmp_path):
    engine = process("VLLM::Worker", SLEEP)
    child = launch(process("VLLM::EngineCore_DP0", engine, "VLLM::DPCoordinator", SLEEP, "VLLM::APIServer_0", SLEEP))
    pids = pids_printed(tmp_path / "out", 4)
    assert child.kill_engines()
    assert until(lambda: sum(map(alive, pids)) == 3)
    child.kill()
    assert child.wait_gone(20) and not any(map(alive, pids))


@pytest.mark.parametrize(("title", "several"), [("VLLM::EngineCore", False), ("VLLM::APIServer_0", True)])
def test_several_api_servers_are_told_from_a_single_one(launch, tmp_path, title, several):
    child = launch(process(title, SLEEP))
    pids_printed(tmp_path / "out", 1)
    assert child.has_several_api_servers() is several


def test_a_server_starts_with_default_signals(launch, tmp_path):
    child = launch("import signal; print(int(signal.getsignal(15) == signal.SIG_DFL))")
    child.wait_gone(20)
    assert pids_printed(tmp_path / "out", 1) == [1]


def test_a_keeper_is_out_of_the_terminals_reach_before_it_does_anything(monkeypatch):
    told = "import os, sys; os.write(int(sys.argv[1]), b'pid %d\\ngone\\n' % (os.getsid(0) == os.getpid()))"
    monkeypatch.setattr("legroom.actions.child._KEEPER", told)
    child = Child(["vllm"], os.environ)
    child.close()
    assert child.pid == 1


def test_a_program_that_is_not_there_says_so():
    with pytest.raises(LegroomError, match="No such file") as error:
        Child(["/no/such/vllm", "serve"], os.environ)
    assert error.value.exit_code == 3


def test_what_a_killed_server_leaves_behind_is_killed(launch, tmp_path):
    child = launch(FAMILY, leftover_grace_s=0.2)
    core, worker = pids_printed(tmp_path / "out", 2)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait_gone(20)
    assert not alive(core)
    assert not alive(worker)


def test_kill_takes_everything(launch, tmp_path):
    child = launch(FAMILY)
    pids = pids_printed(tmp_path / "out", 2)
    child.kill()
    assert child.wait_gone(20)
    assert not any(alive(pid) for pid in pids)


def test_after_a_kill_nothing_is_given_time_to_end_by_itself(launch, tmp_path):
    # Spared at first, by its name, which must not stand in the server's own command line.
    cleaner = f"[sys.executable, '-c', {SLEEP!r}, 'multiprocessing.' + 'resource_tracker']"
    code = f"import subprocess, sys, time; print(subprocess.Popen({cleaner}).pid, flush=True); time.sleep(600)"
    child = launch(code, leftover_grace_s=60.0)
    (pid,) = pids_printed(tmp_path / "out", 1)
    child.kill()
    assert child.wait_gone(20)
    assert not alive(pid)


def test_a_killed_keeper_leaves_nothing(launch, tmp_path):
    child = launch(FAMILY)
    pids = [child.pid, *pids_printed(tmp_path / "out", 2)]
    os.kill(child.keeper_pid, signal.SIGKILL)
    assert child.wait_gone(20)
    assert not any(alive(pid) for pid in pids)
    assert child.exit_code == 137


def test_a_killed_legroom_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    code = (
        "import os, sys, time\nfrom legroom.actions.child import Child\n"
        f"out = os.open({str(out)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)\n"
        f"child = Child([sys.executable, '-c', {FAMILY!r}], os.environ, outputs=(out, out))\n"
        "os.write(out, f'{child.pid} {child.keeper_pid}\\n'.encode())\ntime.sleep(600)"
    )
    legroom = subprocess.Popen([sys.executable, "-c", code])
    pids = pids_printed(out, 4)
    legroom.send_signal(signal.SIGKILL)
    legroom.wait()
    assert until(lambda: not any(alive(pid) for pid in pids))


def test_a_pid_that_now_belongs_to_another_gets_no_signal(launch):
    child = launch(SLEEP)
    assert not send_signal(child.pid, process_start_ticks(child.pid) + 1, signal.SIGKILL)
    assert alive(child.pid)


def test_descendants_are_found_below_and_nowhere_else(launch, tmp_path):
    child = launch(FAMILY)
    core, worker = pids_printed(tmp_path / "out", 2)
    assert set(descendants(child.pid)) == {core, worker}
    assert os.getpid() not in descendants(child.keeper_pid)


def test_a_closed_output_does_not_stop_the_server(launch):
    reading, writing = os.pipe()
    os.close(reading)
    child = launch("for n in range(5000): print('x' * 100)\nraise SystemExit(4)", outputs=(writing, writing))
    assert child.wait_gone(20)
    assert child.exit_code == 4


def test_a_log_keeps_its_start_and_its_newest_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("legroom.actions.server_log.TAIL_BYTES", 1000)
    log = ServerLog(tmp_path / "log")
    log.write(b"the start\n")
    log.started()
    for number in range(1000):
        log.write(b"line %d\n" % number)
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "the start"
    assert "left out" in lines[1]
    assert lines[2].startswith("line ")
    assert lines[-1] == "line 999"
    assert (tmp_path / "log").stat().st_size < 2200


def test_the_last_lines_of_a_missing_log_are_none(tmp_path):
    assert last_lines(tmp_path / "no", 5) == []
