"""What `legroom run` does after the server was up: crashes, hangs, changes, budgets. On the stand-in too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked import QUICK
from held_run import Run, is_free, until

from legroom.process_table import descendants, process_start_ticks


def test_a_dead_engine_is_an_incident_and_a_restart(run):
    supervised = run("--no-verify")
    supervised.serving()
    first = supervised.file()["child_pid"]
    os.kill(supervised.engine(), signal.SIGKILL)
    supervised.serving(times=2)
    assert supervised.file()["child_pid"] != first
    assert supervised.end() == 0
    (incident,) = supervised.incidents()
    assert incident.kind == "died_serving"
    assert [action.state for action in incident.actions] == ["done"]


def test_a_killed_process_is_named_with_its_signal(run):
    supervised = run("--no-verify")
    supervised.serving()
    pid = supervised.file()["child_pid"]
    os.kill(pid, signal.SIGKILL)
    told = supervised.said("diagnosis: ")
    assert f"(pid {pid}) died of SIGKILL, sent by somebody" in told


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_worker_without_a_title_that_somebody_kills_is_named_too(run, number):
    supervised = run("--no-verify")
    supervised.serving()
    worker = max(descendants(supervised.engine()))
    os.kill(worker, number)
    assert f"an untitled process (pid {worker}) died of {number.name}" in supervised.said("diagnosis: ")
    supervised.serving(times=2)


def test_a_server_that_ran_out_of_memory_is_restarted_with_the_fix(run):
    supervised = run("--no-verify")
    supervised.serving()
    supervised.attempt(1, "too much")
    supervised.serving(times=2)
    flag, share = supervised.file()["command"][-2:]
    assert flag == "--gpu-memory-utilization" and 0.8 < float(share) < 0.92
    assert f"changed {flag} {share}" in supervised.said("restart in")
    supervised.end()
    (incident,) = supervised.incidents()
    assert "runs out (LR401)" in incident.notes[0].text
    assert incident.actions[0].detail["changed"] == f"{flag} {share}"


def test_a_fix_that_is_only_a_variable_is_applied_after_a_crash_too(run):
    supervised = run("--no-verify", "--json")
    supervised.serving()
    supervised.attempt(1, "in pieces")
    supervised.serving(times=2)
    assert "changed PYTORCH_ALLOC_CONF=expandable_segments:True" in supervised.said("restart in")
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in supervised.err.read_text().rpartition("serving at")[2]
    supervised.end()
    (died,) = json.loads(supervised.out.read_text())["history"]
    assert died["changed"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_what_was_not_changed_is_not_said_to_be(run):
    supervised = run("--no-verify", "--json", "--on-crash", "exit")
    supervised.serving()
    supervised.attempt(1, "in pieces")
    assert supervised.process.wait(120) == 1
    (died,) = json.loads(supervised.out.read_text())["history"]
    assert died["changed"] is None


def test_an_unasked_end_is_never_a_success(run):
    supervised = run("--no-verify", "--on-crash", "exit")
    supervised.serving()
    os.kill(supervised.engine(), signal.SIGKILL)
    assert supervised.process.wait(120) == 1
    assert "exited 0" in supervised.said("its engine died")


def test_a_command_that_has_served_is_tried_again_after_a_failed_start(run, tmp_path):
    trouble = tmp_path / "trouble"
    supervised = run("--no-verify", STAND_IN_BROKEN=str(trouble))
    supervised.serving()
    trouble.touch()
    os.kill(supervised.engine(), signal.SIGKILL)
    supervised.said("it has served before")
    trouble.unlink()
    supervised.serving(times=2)
    assert supervised.end() == 0
    (incident,) = supervised.incidents()
    assert (incident.kind, incident.outcome) == ("died_serving", "it serves again")
    assert incident.actions[0].state == "failed"
    assert incident.actions[-1].state == "done"


def test_failed_starts_after_a_crash_end_with_the_budget_too(run, tmp_path):
    trouble = tmp_path / "trouble"
    supervised = run("--no-verify", "--restarts", "2", STAND_IN_BROKEN=str(trouble))
    supervised.serving()
    trouble.touch()
    os.kill(supervised.engine(), signal.SIGKILL)
    assert supervised.process.wait(120) == 1
    supervised.said("2 restarts in an hour are used up")
    (incident,) = supervised.incidents()
    assert "used up" in incident.outcome


def test_tries_that_fail_are_one_incident(run):
    supervised = run("--tries", "1", flags=("--max-model-len", "2048", "--seed", "x"), STAND_IN_KV_TOKENS="0")
    assert supervised.process.wait(120) == 1
    (incident,) = supervised.incidents()
    assert incident.kind == "start_failed"
    assert incident.outcome


def test_an_incident_ends_when_the_run_is_asked_to_stop(run):
    supervised = run("--no-verify", "--restart-delay", "60")
    supervised.serving()
    os.kill(supervised.engine(), signal.SIGKILL)
    supervised.said("restart in 60 s")
    supervised.end()
    (incident,) = supervised.incidents()
    assert incident.outcome == "asked to stop"
    assert [action.state for action in incident.actions] == ["failed"]


def test_restarts_end_with_their_budget(run):
    supervised = run("--no-verify", "--restarts", "1")
    supervised.serving()
    os.kill(supervised.engine(), signal.SIGKILL)
    supervised.serving(times=2)
    os.kill(supervised.engine(), signal.SIGKILL)
    assert supervised.process.wait(120) == 1
    assert "used up" in supervised.said("restarts in an hour")
    assert len(supervised.incidents()) == 2


def test_a_killed_legroom_leaves_no_process_and_no_port(run, port):
    supervised = run("--no-verify")
    supervised.serving()
    pids = supervised.everything()
    assert len(pids) == 4
    supervised.end(signal.SIGKILL)
    until(lambda: not any(process_start_ticks(pid) for pid in pids))
    assert is_free(port)


def test_sighup_restarts_with_what_was_left_for_it(run, port):
    supervised = run("--no-verify")
    supervised.serving()
    changes = {"flags": {"--max-model-len": "512"}, "env": {"OMP_NUM_THREADS": "1"}}
    (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps(changes))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=2)
    assert supervised.file()["command"][-2:] == ["--max-model-len", "512"]
    assert supervised.end() == 0
    assert not supervised.incidents()
    assert not (supervised.home / f"runs/{port}.json").exists()


def test_a_change_that_does_not_start_is_taken_back(run, port):
    supervised = run("--no-verify", STAND_IN_MARK="1")
    supervised.serving()
    before = supervised.file()["command"]
    for times, length in ((2, "512"), (3, None)):
        (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--max-model-len": length}}))
        supervised.process.send_signal(signal.SIGHUP)
        supervised.serving(times)
    changes = {"env": {"STAND_IN_EXIT": "5", "STAND_IN_MARK": None}}
    (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps(changes))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=4)
    supervised.said("back to what has served")
    assert (supervised.file()["command"], supervised.file()["env"]) == (before, {})
    assert b"STAND_IN_MARK=1" in Path(f"/proc/{supervised.file()['child_pid']}/environ").read_bytes().split(b"\0")
    assert supervised.end() == 0
    (incident,) = supervised.incidents()
    assert (incident.kind, incident.outcome) == ("start_failed", "it serves again")


def test_a_change_that_vllm_would_refuse_is_left_out(run, port):
    supervised = run("--no-verify")
    supervised.serving()
    before = supervised.file()["command"]
    (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--nosuchflag": "1"}}))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=2)
    supervised.said("the changes for this restart are left out: no vLLM release has --nosuchflag")
    assert supervised.file()["command"] == before
    assert supervised.end() == 0


def test_a_server_that_hangs_is_an_incident_and_a_restart(run):
    supervised = run("--no-verify", "--hang-timeout", "0.8")
    supervised.serving()
    os.kill(supervised.file()["child_pid"], signal.SIGSTOP)
    supervised.serving(times=2)
    supervised.said("it hangs: it could not serve for 0.8 s")
    assert supervised.end() == 0
    (incident,) = supervised.incidents()
    assert (incident.kind, incident.outcome) == ("died_serving", "it serves again")
    assert "hung" in incident.title


@pytest.mark.parametrize("before_the_drain", [True, False])
@pytest.mark.parametrize("stopped", ["engine", "API server"])
def test_what_is_stopped_and_has_no_title_is_not_waited_for(run, stopped, before_the_drain):
    supervised = run("--no-verify", "--drain", "60", flags=("--shutdown-timeout", "60"))
    supervised.serving()
    asking = threading.Thread(target=supervised.attempt, args=(9_000,), daemon=True)
    asking.start()
    supervised.received()
    pid = supervised.engine() if stopped == "engine" else supervised.file()["child_pid"]
    if before_the_drain:
        os.kill(pid, signal.SIGSTOP)
    supervised.process.send_signal(signal.SIGTERM)
    if not before_the_drain:
        supervised.said("draining")
        os.kill(pid, signal.SIGSTOP)
    supervised.said("an engine is stopped")
    assert supervised.process.wait(60) is not None
    asking.join(60)
    assert not asking.is_alive()


def test_a_sighup_between_two_lives_counts_for_the_next(run, port):
    supervised = run("--no-verify", "--restart-delay", "0.5")
    supervised.serving()
    os.kill(supervised.engine(), signal.SIGKILL)
    supervised.said("restart in 0.5 s")
    (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--max-model-len": "512"}}))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=2)
    assert supervised.file()["command"][-2:] == ["--max-model-len", "512"]
    assert not (supervised.home / f"runs/{port}.flags.json").exists()
    assert supervised.end() == 0


def test_a_sighup_that_would_move_the_server_leaves_it_alone(run, port):
    supervised = run("--no-verify")
    supervised.serving()
    before = supervised.file()
    (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--port": "1"}}))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.said("SIGHUP: --port cannot be changed while it runs")
    assert supervised.file() == before
    assert not (supervised.home / f"runs/{port}.flags.json").exists()
    assert supervised.end() == 0


def test_a_variable_that_is_null_is_taken_away(run, port):
    supervised = run("--no-verify", STAND_IN_KV_TOKENS="8192")
    supervised.serving()
    (supervised.home / f"runs/{port}.flags.json").write_text(json.dumps({"env": {"STAND_IN_KV_TOKENS": None}}))
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=2)
    assert supervised.file()["env"] == {}
    assert supervised.end() == 0
    # Only now: the output of a server that is up is passed on a moment later.
    assert "8,192 tokens" in supervised.out.read_text()
    assert "32,768 tokens" in supervised.out.read_text()


@contextlib.contextmanager
def port_taken_by_another(run, port, timing):
    """A run whose engine died and whose port somebody else has before it can be started again."""
    supervised = run("--no-verify", "--json", timing=timing)
    supervised.serving()
    engine = supervised.engine()
    supervised.process.send_signal(signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    until(lambda: is_free(port))
    with socket.create_server(("127.0.0.1", port)):
        supervised.process.send_signal(signal.SIGCONT)
        supervised.said("restart in 0 s")
        yield supervised


def test_a_stop_is_heard_while_a_restart_waits_for_its_port(run, port):
    with port_taken_by_another(run, port, replace(QUICK, port_timeout_s=60.0)) as supervised:
        time.sleep(0.3)  # it waits for the port now
        assert supervised.process.poll() is None
        assert supervised.end() == 1
    assert json.loads(supervised.out.read_text())["exit_code"] == 1
    (incident,) = supervised.incidents()
    assert incident.outcome == "asked to stop"


def test_a_port_that_was_taken_between_two_lives_ends_the_run(run, port):
    with port_taken_by_another(run, port, QUICK) as supervised:
        assert supervised.process.wait(120) == 1
    supervised.said("is in use: not started again")
    assert json.loads(supervised.out.read_text())["exit_code"] == 1


@pytest.mark.parametrize("home", ["home", "second/home"])
def test_a_second_run_of_a_port_is_refused_while_the_first_one_starts(run, tmp_path, port, home):
    first = run("--no-verify", STAND_IN_START_S="1")
    until((first.home / f"runs/{port}.json").exists)
    before = first.file()
    folder = tmp_path / "second"
    folder.mkdir()
    second = Run(folder, port, [], [], {"LEGROOM_HOME": str(tmp_path / home)})
    assert second.process.wait(120) == 2
    assert f"another legroom run (pid {first.process.pid})" in second.err.read_text()
    progress = ("state", "started_s")  # which the first one writes itself once it serves
    assert {**first.file(), **dict.fromkeys(progress)} == {**before, **dict.fromkeys(progress)}
    first.serving()
    assert first.end() == 0


def test_a_stop_between_two_lives_starts_nothing(run):
    supervised = run("--no-verify", "--restart-delay", "60")
    supervised.serving()
    os.kill(supervised.engine(), signal.SIGKILL)
    supervised.said("restart in 60 s")
    assert supervised.end() == 1
    assert supervised.out.read_text().count("startup complete") == 1


def test_as_the_first_process_of_a_container_it_collects_what_others_leave(run):
    contained = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*contained, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no container can be made here")
    # The shell leaves a child behind, and becomes legroom.
    supervised = run("--no-verify", before=[*contained, "sh", "-c", 'sleep 0 & exec "$@"', "sh"])
    supervised.serving()
    (first,) = psutil.Process(supervised.process.pid).children()

    def has_none_left() -> bool:
        try:
            return all(child.status() != psutil.STATUS_ZOMBIE for child in first.children())
        except psutil.NoSuchProcess:
            return False

    until(has_none_left)
    first.terminate()
    assert supervised.process.wait(120) == 0


def test_the_run_file_has_no_keys_and_a_restart_has(run):
    flags = ("--api-key", "sk-very-secret", "--hf-token=hf_very_secret")
    flags += ("--additional-config", '{"token": "a-secret", "of": {"hf_token": "b-secret", "key": "c-secret"}}')
    supervised = run("--no-verify", flags=flags)
    supervised.serving()
    supervised.process.send_signal(signal.SIGHUP)
    supervised.serving(times=2)
    text = (supervised.home / f"runs/{supervised.port}.json").read_text()
    assert "secret" not in text + supervised.err.read_text() and "--api-key" in supervised.file()["command"]
    words = Path(f"/proc/{supervised.file()['child_pid']}/cmdline").read_bytes().split(b"\0")
    assert b"sk-very-secret" in words and b"--hf-token=hf_very_secret" in words


def test_what_ends_after_a_killed_keeper_is_collected(run):
    supervised = run("--no-verify", STAND_IN_LATE_THREAD="1")
    supervised.serving()
    late = [psutil.Process(pid) for pid in psutil.pids() if is_late_worker(pid, supervised.file()["keeper_pid"])]
    assert late
    os.kill(supervised.file()["keeper_pid"], signal.SIGKILL)
    supervised.serving(times=2)
    until(lambda: not any(process.is_running() for process in late))


def is_late_worker(pid: int, keeper: int) -> bool:
    """Whether it is a worker below the keeper whose first thread has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and keeper in (above.pid for above in process.parents())
    return False
