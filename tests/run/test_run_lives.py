"""What `legroom run` does after the server was up: crashes, hangs, changes, budgets. On the stand-in too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked import QUICK
from held_run import Run, is_free, until

from legroom.actions.descendants import started


def test_a_dead_engine_is_an_incident_and_a_restart(run):
    held = run("--no-verify")
    held.serving()
    first = held.file()["child_pid"]
    os.kill(held.engine(), signal.SIGKILL)
    held.serving(times=2)
    assert held.file()["child_pid"] != first
    assert held.end() == 0
    (incident,) = held.incidents()
    assert incident.kind == "died_serving"
    assert [action.state for action in incident.actions] == ["done"]


def test_a_server_that_ran_out_of_memory_is_restarted_with_the_fix(run):
    held = run("--no-verify")
    held.serving()
    held.attempt(1, "too much")
    held.serving(times=2)
    assert "changed --gpu-memory-utilization 0.9" in held.said("restart in")
    assert held.file()["command"][-2:] == ["--gpu-memory-utilization", "0.9"]
    held.end()
    (incident,) = held.incidents()
    assert "runs out (LR401)" in incident.notes[0].text
    assert incident.actions[0].detail["changed"] == "--gpu-memory-utilization 0.9"


def test_a_fix_that_is_only_a_variable_is_applied_after_a_crash_too(run):
    held = run("--no-verify", "--json")
    held.serving()
    held.attempt(1, "in pieces")
    held.serving(times=2)
    assert "changed PYTORCH_ALLOC_CONF=expandable_segments:True" in held.said("restart in")
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in held.err.read_text().rpartition("serving at")[2]
    held.end()
    (died,) = json.loads(held.out.read_text())["history"]
    assert died["changed"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_what_was_not_changed_is_not_said_to_be(run):
    held = run("--no-verify", "--json", "--on-crash", "exit")
    held.serving()
    held.attempt(1, "in pieces")
    assert held.process.wait(120) == 1
    (died,) = json.loads(held.out.read_text())["history"]
    assert died["changed"] is None


def test_an_unasked_end_is_never_a_success(run):
    held = run("--no-verify", "--on-crash", "exit")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    assert held.process.wait(120) == 1
    assert "exited 0" in held.said("its engine died")


def test_a_command_that_has_served_is_tried_again_after_a_failed_start(run, tmp_path):
    trouble = tmp_path / "trouble"
    held = run("--no-verify", STAND_IN_BROKEN=str(trouble))
    held.serving()
    trouble.touch()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("it has served before")
    trouble.unlink()
    held.serving(times=2)
    assert held.end() == 0
    (incident,) = held.incidents()
    assert (incident.kind, incident.outcome) == ("died_serving", "it serves again")
    assert incident.actions[0].state == "failed"
    assert incident.actions[-1].state == "done"


def test_failed_starts_after_a_crash_end_with_the_budget_too(run, tmp_path):
    trouble = tmp_path / "trouble"
    held = run("--no-verify", "--restarts", "2", STAND_IN_BROKEN=str(trouble))
    held.serving()
    trouble.touch()
    os.kill(held.engine(), signal.SIGKILL)
    assert held.process.wait(120) == 1
    held.said("2 restarts in an hour are used up")
    (incident,) = held.incidents()
    assert "used up" in incident.outcome


def test_tries_that_fail_are_one_incident(run):
    held = run("--tries", "1", flags=("--max-model-len", "2048", "--seed", "x"), STAND_IN_KV_TOKENS="0")
    assert held.process.wait(120) == 1
    (incident,) = held.incidents()
    assert incident.kind == "start_failed"
    assert incident.outcome


def test_an_incident_ends_when_the_run_is_asked_to_stop(run):
    held = run("--no-verify", "--restart-delay", "60")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("restart in 60 s")
    held.end()
    (incident,) = held.incidents()
    assert incident.outcome == "asked to stop"
    assert [action.state for action in incident.actions] == ["failed"]


def test_restarts_end_with_their_budget(run):
    held = run("--no-verify", "--restarts", "1")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.serving(times=2)
    os.kill(held.engine(), signal.SIGKILL)
    assert held.process.wait(120) == 1
    assert "used up" in held.said("restarts in an hour")
    assert len(held.incidents()) == 2


def test_a_killed_legroom_leaves_no_process_and_no_port(run, port):
    held = run("--no-verify")
    held.serving()
    pids = held.everything()
    assert len(pids) == 4
    held.end(signal.SIGKILL)
    until(lambda: not any(started(pid) for pid in pids))
    assert is_free(port)


def test_sighup_restarts_with_what_was_left_for_it(run, port):
    held = run("--no-verify")
    held.serving()
    changes = {"flags": {"--max-model-len": "512"}, "env": {"OMP_NUM_THREADS": "1"}}
    (held.home / f"runs/{port}.flags.json").write_text(json.dumps(changes))
    held.process.send_signal(signal.SIGHUP)
    held.serving(times=2)
    assert held.file()["command"][-2:] == ["--max-model-len", "512"]
    assert held.end() == 0
    assert not held.incidents()
    assert not (held.home / f"runs/{port}.json").exists()


def test_a_change_that_does_not_start_is_taken_back(run, port):
    held = run("--no-verify", STAND_IN_MARK="1")
    held.serving()
    before = held.file()["command"]
    for times, length in ((2, "512"), (3, None)):
        (held.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--max-model-len": length}}))
        held.process.send_signal(signal.SIGHUP)
        held.serving(times)
    changes = {"env": {"STAND_IN_EXIT": "5", "STAND_IN_MARK": None}}
    (held.home / f"runs/{port}.flags.json").write_text(json.dumps(changes))
    held.process.send_signal(signal.SIGHUP)
    held.serving(times=4)
    held.said("back to what has served")
    assert (held.file()["command"], held.file()["env"]) == (before, {})
    assert b"STAND_IN_MARK=1" in Path(f"/proc/{held.file()['child_pid']}/environ").read_bytes().split(b"\0")
    assert held.end() == 0
    (incident,) = held.incidents()
    assert (incident.kind, incident.outcome) == ("start_failed", "it serves again")


def test_a_change_that_vllm_would_refuse_is_left_out(run, port):
    held = run("--no-verify")
    held.serving()
    before = held.file()["command"]
    (held.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--nosuchflag": "1"}}))
    held.process.send_signal(signal.SIGHUP)
    held.serving(times=2)
    held.said("the changes for this restart are left out: no vLLM release has --nosuchflag")
    assert held.file()["command"] == before
    assert held.end() == 0


def test_a_server_that_hangs_is_an_incident_and_a_restart(run):
    held = run("--no-verify", "--hang-timeout", "0.8")
    held.serving()
    os.kill(held.file()["child_pid"], signal.SIGSTOP)
    held.serving(times=2)
    held.said("it hangs: no answer and no work for 0.8 s")
    assert held.end() == 0
    (incident,) = held.incidents()
    assert (incident.kind, incident.outcome) == ("died_serving", "it serves again")
    assert "hung and was killed" in incident.title


def test_a_sighup_between_two_lives_counts_for_the_next(run, port):
    held = run("--no-verify", "--restart-delay", "0.5")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("restart in 0.5 s")
    (held.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--max-model-len": "512"}}))
    held.process.send_signal(signal.SIGHUP)
    held.serving(times=2)
    assert held.file()["command"][-2:] == ["--max-model-len", "512"]
    assert not (held.home / f"runs/{port}.flags.json").exists()
    assert held.end() == 0


def test_a_sighup_that_would_move_the_server_leaves_it_alone(run, port):
    held = run("--no-verify")
    held.serving()
    before = held.file()
    (held.home / f"runs/{port}.flags.json").write_text(json.dumps({"flags": {"--port": "1"}}))
    held.process.send_signal(signal.SIGHUP)
    held.said("SIGHUP: --port cannot be changed while it runs")
    assert held.file() == before
    assert not (held.home / f"runs/{port}.flags.json").exists()
    assert held.end() == 0


def test_a_variable_that_is_null_is_taken_away(run, port):
    held = run("--no-verify", STAND_IN_KV_TOKENS="8192")
    held.serving()
    (held.home / f"runs/{port}.flags.json").write_text(json.dumps({"env": {"STAND_IN_KV_TOKENS": None}}))
    held.process.send_signal(signal.SIGHUP)
    held.serving(times=2)
    assert "8,192 tokens" in held.out.read_text()
    assert "32,768 tokens" in held.out.read_text()
    assert held.file()["env"] == {}
    assert held.end() == 0


def dead(run, timing):
    """One whose engine died, and that is about to be started again."""
    held = run("--no-verify", "--json", "--restart-delay", "0.5", timing=timing)
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("restart in 0.5 s")
    return held


def test_a_stop_is_heard_while_a_restart_waits_for_its_port(run, port):
    held = dead(run, replace(QUICK, port_patience_s=60.0))
    with socket.create_server(("127.0.0.1", port)):
        time.sleep(0.8)  # past the delay: it waits for the port now
        assert held.process.poll() is None
        assert held.end() == 1
    assert json.loads(held.out.read_text())["exit_code"] == 1
    (incident,) = held.incidents()
    assert incident.outcome == "asked to stop"


def test_a_port_that_was_taken_between_two_lives_ends_the_run(run, port):
    held = dead(run, QUICK)
    with socket.create_server(("127.0.0.1", port)):
        assert held.process.wait(120) == 1
    held.said("is in use: not started again")
    assert json.loads(held.out.read_text())["exit_code"] == 1


def test_a_second_run_of_a_port_is_refused_while_the_first_one_starts(run, tmp_path, port):
    first = run("--no-verify", STAND_IN_START_S="1")
    until((first.home / f"runs/{port}.json").exists)
    before = first.file()
    folder = tmp_path / "second"
    folder.mkdir()
    second = Run(folder, port, [], [], {"LEGROOM_HOME": str(first.home)})
    assert second.process.wait(120) == 2
    assert f"another legroom run (pid {first.process.pid})" in second.err.read_text()
    assert first.file() == before
    first.serving()
    assert first.end() == 0


def test_a_stop_between_two_lives_starts_nothing(run):
    held = run("--no-verify", "--restart-delay", "60")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("restart in 60 s")
    assert held.end() == 1
    assert held.out.read_text().count("startup complete") == 1


def test_as_the_first_process_of_a_container_it_collects_what_others_leave(run):
    contained = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*contained, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no container can be made here")
    # The shell leaves a child behind, and becomes legroom.
    held = run(before=[*contained, "sh", "-c", 'sleep 0 & exec "$@"', "sh"])
    held.serving()
    (first,) = psutil.Process(held.process.pid).children()

    def has_none_left() -> bool:
        try:
            return all(child.status() != psutil.STATUS_ZOMBIE for child in first.children())
        except psutil.NoSuchProcess:
            return False

    until(has_none_left)
    first.terminate()
    assert held.process.wait(120) == 0
