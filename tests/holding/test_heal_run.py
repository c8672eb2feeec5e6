"""`legroom run` from end to end, on a stand-in with vLLM's process shape that is up in a tenth of a second."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from legroom.actions.descendants import descendants, started
from legroom.holding.health import is_healthy
from legroom.live.journal import Journal

STAND_IN = Path(__file__).with_name("stand_in_vllm.py")


def until(true: Callable[[], Any], patience_s: float = 90.0) -> Any:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


class Run:
    """One `legroom run` of the stand-in."""

    def __init__(
        self, folder: Path, port: int, own: list[str], flags: list[str], env: dict[str, str], before: Sequence[str] = ()
    ) -> None:
        vllm = folder / "vllm"
        vllm.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n")
        vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
        self.folder, self.port, self.home = folder, port, folder / "home"
        words = [
            *before,
            sys.executable,
            "-m",
            "legroom",
            "run",
            "--vllm",
            "0.32.0",
            "--restart-delay",
            "0",
            *own,
            "--",
        ]
        words += [str(vllm), "serve", "tiny", "--port", str(port), *flags]
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=err, env={**os.environ, "LEGROOM_HOME": str(self.home), **env}
            )

    def said(self, text: str) -> str:
        """The first of legroom's lines that holds this text, once it is there."""

        def find() -> str | None:
            lines = self.err.read_text().splitlines()
            return next((line for line in lines if line.startswith("legroom: ") and text in line), None)

        return str(until(find))

    def serving(self, times: int = 1) -> None:
        until(lambda: self.err.read_text().count("legroom: serving at") >= times)

    def file(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / f"runs/{self.port}.json").read_text())
        return found

    def engine(self) -> int:
        below = descendants(self.file()["child_pid"])
        return min(below)

    def everything(self) -> list[int]:
        file = self.file()
        return [file["keeper_pid"], *descendants(file["keeper_pid"])]

    def request(self, max_tokens: int, prompt: str = "x") -> Any:
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            return json.load(answer)

    def received(self) -> None:
        """Waits until a request is inside."""
        until(lambda: "Received request" in self.out.read_text())

    def attempt(self, max_tokens: int, prompt: str = "x") -> None:
        """A request that may well be cut off."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.request(max_tokens, prompt)

    def incidents(self) -> list[Any]:
        with Journal.open(self.home / "journal.db") as journal:
            return [journal.incident(found.id) for found in journal.incidents()]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path, port: int) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*own: str, flags: tuple[str, ...] = (), before: Sequence[str] = (), **env: str) -> Run:
        runs.append(Run(tmp_path, port, list(own), list(flags), env, before))
        return runs[-1]

    yield start
    for one in runs:
        one.process.kill()
        one.process.wait()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_failed_start_is_mended_and_told_in_a_line(run):
    held = run(flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    held.serving()
    line = held.said("try 1 of 3")
    assert "does not fit the KV cache" in line
    assert "Changed: --max-model-len 976 (was 2048)" in line
    assert "Expected now:" in line
    assert "--max-model-len 976" in held.said("serving at")
    assert held.end() == 0
    (incident,) = held.incidents()
    assert incident.kind == "start_failed"
    assert incident.outcome == "it serves again"
    assert [action.state for action in incident.actions] == ["done"]


def test_a_start_is_mended_where_legrooms_folder_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "passing").mkdir()
    held = run(
        flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000", LEGROOM_HOME=str(tmp_path / "file"),
        TMPDIR=str(tmp_path / "passing"),
    )  # fmt: skip
    held.serving()
    assert "Changed: --max-model-len 976 (was 2048)" in held.said("try 1 of 3")
    assert held.end() == 0
    assert not list((tmp_path / "passing").iterdir())


def test_the_servers_output_and_legrooms_lines_are_told_apart(run):
    held = run()
    held.serving()
    held.end()
    assert "legroom: " not in held.out.read_text()
    assert "Application startup complete" in held.out.read_text()


def test_as_json_it_is_one_document_at_the_end_and_the_server_speaks_on_stderr(run):
    held = run("--json", flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    held.serving()
    assert held.end() == 0
    document = json.loads(held.out.read_text())
    (failed,) = document["history"]
    assert (failed["what"], failed["cause"]) == ("start_failed", "kv_too_small_for_max_len")
    assert document["command"][-1] == "976" and document["verified"] is True and document["exit_code"] == 0
    assert "Application startup complete" in held.err.read_text()


def test_a_kept_flag_stops_the_run_with_the_servers_code(run):
    held = run("--keep", "--max-model-len", flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    assert held.process.wait(120) == 1
    assert "--max-model-len 976" in held.said("Not tried again")


def test_a_server_that_ends_at_once_passes_its_code_on(run):
    held = run(STAND_IN_EXIT="5")
    assert held.process.wait(120) == 5


def test_sigterm_lets_requests_finish(run):
    held = run("--no-verify")
    held.serving()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(held.request(100)))
    asking.start()
    held.received()
    assert held.end() == 0
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 100


def test_a_server_that_has_just_come_up_may_finish_its_requests_too(run, port):
    held = run("--no-verify")
    until(lambda: is_healthy("127.0.0.1", port))  # legroom itself looks once a second
    assert held.end() == 0
    held.said("SIGTERM: draining, 75 s at most")


def test_a_guard_that_cannot_be_closed_keeps_nothing_from_ending(run):
    held = run("--no-verify", flags=("--middleware", "legroom.guard.Guard"))  # the stand-in loads no middleware
    held.serving()
    assert held.end() == 0
    held.said("the guard has no drain endpoint")


def test_a_second_sigterm_hurries(run):
    held = run("--no-verify")
    held.serving()
    threading.Thread(target=lambda: held.attempt(3000), daemon=True).start()
    held.received()
    held.process.send_signal(signal.SIGTERM)
    held.said("draining")
    assert held.end() == 0


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
    held = run("--no-verify", "--hang-timeout", "4")
    held.serving()
    os.kill(held.file()["child_pid"], signal.SIGSTOP)
    held.serving(times=2)
    held.said("it hangs: no answer and no work for 4 s")
    assert held.end() == 0
    (incident,) = held.incidents()
    assert (incident.kind, incident.outcome) == ("died_serving", "it serves again")
    assert "hung and was killed" in incident.title


def test_a_sighup_between_two_lives_counts_for_the_next(run, port):
    held = run("--no-verify", "--restart-delay", "2")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("restart in 2 s")
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


@pytest.fixture
def dead(run):
    """One whose engine died, and that is about to be started again."""
    held = run("--no-verify", "--json", "--restart-delay", "1")
    held.serving()
    os.kill(held.engine(), signal.SIGKILL)
    held.said("restart in 1 s")
    return held


def test_a_stop_is_heard_while_a_restart_waits_for_its_port(dead, port):
    with socket.create_server(("127.0.0.1", port)):
        time.sleep(2)
        assert dead.process.poll() is None
        assert dead.end() == 1
    assert json.loads(dead.out.read_text())["exit_code"] == 1
    (incident,) = dead.incidents()
    assert incident.outcome == "asked to stop"


def test_a_port_that_was_taken_between_two_lives_ends_the_run(dead, port):
    with socket.create_server(("127.0.0.1", port)):
        assert dead.process.wait(120) == 1
    dead.said("is in use: not started again")
    assert json.loads(dead.out.read_text())["exit_code"] == 1


def test_a_second_run_of_a_port_is_refused_while_the_first_one_starts(run, tmp_path, port):
    first = run("--no-verify", STAND_IN_START_S="3")
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


def test_a_port_in_use_is_said_before_anything_starts(run, port):
    with socket.create_server(("127.0.0.1", port)):
        held = run()
        assert held.process.wait(120) == 2
    assert "in use" in held.err.read_text()
    assert held.out.read_text() == ""


def test_a_server_that_never_becomes_healthy_is_stopped_with_its_last_lines(run):
    held = run("--ready-timeout", "6", STAND_IN_START_S="60")
    assert held.process.wait(120) != 0
    assert "not healthy after 6 s" in held.said("not healthy")
    assert "non-default args" in held.said("non-default args")


def test_a_dry_run_shows_the_command_and_starts_nothing(run):
    held = run("--dry-run")
    assert held.process.wait(120) == 0
    assert "--shutdown-timeout 60" in held.out.read_text()
    assert "starting" not in held.err.read_text()
    assert not (held.home / "runs").exists()


def test_a_shutdown_timeout_of_the_users_own_stays(run):
    held = run("--dry-run", flags=("--shutdown-timeout", "5"))
    assert held.process.wait(120) == 0
    assert held.out.read_text().count("--shutdown-timeout") == 1


def test_a_shutdown_timeout_of_a_config_file_stays(run, tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("shutdown-timeout: 300\n")
    held = run("--dry-run", flags=("--config", str(file)))
    assert held.process.wait(120) == 0
    assert "--shutdown-timeout" not in held.out.read_text()


@pytest.mark.parametrize(("drain", "added"), [("0", "1"), ("0.4", "1"), ("2.5", "3")])
def test_no_drain_is_too_short_for_vllm_to_go(run, drain, added):
    held = run("--dry-run", "--drain", drain)
    assert held.process.wait(120) == 0
    assert held.out.read_text().endswith(f"--shutdown-timeout {added}\n")


def test_a_shutdown_timeout_that_is_no_number_is_vllms_to_refuse(run):
    held = run("--dry-run", flags=("--shutdown-timeout", "abc"))
    assert held.process.wait(120) == 1
    held.said("will refuse it: --shutdown-timeout takes a whole number")


def test_the_final_settings_are_saved_as_a_script(run, tmp_path):
    script = tmp_path / "start.sh"
    held = run("--save", str(script), flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    held.said("saved as")
    held.end()
    assert "--max-model-len 976" in script.read_text()
    assert os.access(script, os.X_OK)


def test_a_script_that_cannot_be_written_is_said_before_anything_starts(run, tmp_path):
    held = run("--save", str(tmp_path / "no/start.sh"))
    assert held.process.wait(120) == 2
    assert "--save" in held.err.read_text()


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
