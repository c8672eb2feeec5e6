"""`legroom run` from end to end, on a stand-in with vLLM's process shape that is up in a tenth of a second."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import Any

import pytest
from held_run import until, watched_by

from legroom.run.health import ServerAddress


def test_a_failed_start_is_mended_and_told_in_a_line(run):
    supervised = run(flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    supervised.serving()
    line = supervised.said("try 1 of 3")
    assert "the KV cache" in line
    assert "Changed: --max-model-len 1000 (was 2048)" in line
    assert "Expected now:" in line
    assert "--max-model-len 1000" in supervised.said("serving at")
    assert supervised.end() == 0
    (incident,) = supervised.incidents()
    assert incident.kind == "start_failed"
    assert incident.outcome == "it serves again"
    assert [action.state for action in incident.actions] == ["done"]


def test_a_start_is_mended_where_legrooms_folder_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "passing").mkdir()
    supervised = run(
        flags=("--max-model-len", "2048"),
        STAND_IN_KV_TOKENS="1000",
        LEGROOM_HOME=str(tmp_path / "file"),
        TMPDIR=str(tmp_path / "passing"),
    )
    supervised.serving()
    assert "Changed: --max-model-len 1000 (was 2048)" in supervised.said("try 1 of 3")
    assert supervised.end() == 0
    assert not list((tmp_path / "passing").iterdir())


def test_the_servers_output_and_legrooms_lines_are_told_apart(run):
    supervised = run()
    supervised.serving()
    supervised.end()
    assert "legroom: " not in supervised.out.read_text()
    assert "Application startup complete" in supervised.out.read_text()


def test_as_json_it_is_one_document_at_the_end_and_the_server_speaks_on_stderr(run):
    supervised = run("--json", flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    supervised.serving()
    assert supervised.end() == 0
    document = json.loads(supervised.out.read_text())
    (failed,) = document["history"]
    assert (failed["what"], failed["cause"]) == ("start_failed", "kv_too_small_for_max_len")
    assert document["command"][-1] == "1000" and document["verified"] is True and document["exit_code"] == 0
    assert "Application startup complete" in supervised.err.read_text()


def test_a_kept_flag_stops_the_run_with_the_servers_code(run):
    supervised = run("--keep", "--max-model-len", flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    assert supervised.process.wait(120) == 1
    assert "--max-model-len 1000" in supervised.said("Not tried again")


def test_a_server_that_ends_at_once_passes_its_code_on(run):
    supervised = run(STAND_IN_EXIT="5")
    assert supervised.process.wait(120) == 5


def test_sigterm_lets_requests_finish(run):
    supervised = run("--no-verify")
    supervised.serving()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(supervised.request(40)))
    asking.start()
    supervised.received()
    assert supervised.end() == 0
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 40


def test_a_server_that_has_just_come_up_may_finish_its_requests_too(run, port):
    supervised = run("--no-verify")
    until(ServerAddress("127.0.0.1", port).is_healthy)  # legroom itself looks once a second
    assert supervised.end() == 0
    supervised.said("SIGTERM: draining, 75 s at most")


def test_a_guard_that_cannot_be_closed_keeps_nothing_from_ending(run):
    supervised = run("--no-verify", flags=("--middleware", "legroom.guard.Guard"))  # the stand-in loads no middleware
    supervised.serving()
    assert supervised.end() == 0
    supervised.said("the guard has no drain endpoint")


def test_a_second_sigterm_hurries(run):
    supervised = run("--no-verify")
    supervised.serving()
    threading.Thread(target=lambda: supervised.attempt(3000), daemon=True).start()
    supervised.received()
    supervised.process.send_signal(signal.SIGTERM)
    supervised.said("draining")
    assert supervised.end() == 0


def test_a_port_in_use_is_said_before_anything_starts(run, port):
    with socket.create_server(("127.0.0.1", port)):
        supervised = run()
        assert supervised.process.wait(120) == 2
    assert "in use" in supervised.err.read_text()
    assert supervised.out.read_text() == ""


def test_a_server_that_never_becomes_healthy_is_stopped_with_its_last_lines(run):
    supervised = run("--ready-timeout", "2", STAND_IN_START_S="60")
    assert supervised.process.wait(120) != 0
    assert "after 2 s" in supervised.said("not healthy")
    assert "non-default args" in supervised.said("non-default args")


@pytest.mark.parametrize("victim", ["child_pid", "keeper_pid"])
def test_a_server_that_somebody_kills_while_it_starts_is_started_again(run, victim):
    supervised = run("--no-verify", "--restart-delay", "0.1", STAND_IN_START_S="3")
    until((supervised.home / "runs" / f"{supervised.port}.json").exists)
    os.kill(supervised.file()[victim], signal.SIGKILL)
    assert "died of SIGKILL" in supervised.said("start failed")
    supervised.serving()
    assert supervised.end() == 0


def test_an_engine_that_somebody_kills_while_it_starts_is_named_and_started_again(run):
    supervised = run("--no-verify", "--restart-delay", "0.1", STAND_IN_START_S="3")
    until(lambda: supervised.out.exists() and "KV cache size" in supervised.out.read_text())
    engine = supervised.engine()
    until(lambda: engine in watched_by(supervised.process.pid))
    os.kill(engine, signal.SIGKILL)
    assert f"an untitled process (pid {engine}) died of SIGKILL, sent by somebody" in supervised.said("start failed")
    supervised.serving()
    assert supervised.end() == 0


def test_a_dry_run_shows_the_command_and_starts_nothing(run):
    supervised = run("--dry-run")
    assert supervised.process.wait(120) == 0
    assert "--shutdown-timeout 60" in supervised.out.read_text()
    assert "starting" not in supervised.err.read_text()
    assert not (supervised.home / "runs").exists()


def test_a_folder_that_is_not_there_is_said_before_anything_starts(run):
    supervised = run("--dry-run", flags=("--model", "/models/nowhere"))
    assert supervised.process.wait(120) == 2
    assert "there is no file or folder /models/nowhere" in supervised.err.read_text()


def test_a_shutdown_timeout_of_the_users_own_stays(run):
    supervised = run("--dry-run", flags=("--shutdown-timeout", "5"))
    assert supervised.process.wait(120) == 0
    assert supervised.out.read_text().count("--shutdown-timeout") == 1


def test_a_shutdown_timeout_of_a_config_file_stays(run, tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("shutdown-timeout: 300\n")
    supervised = run("--dry-run", flags=("--config", str(file)))
    assert supervised.process.wait(120) == 0
    assert "--shutdown-timeout" not in supervised.out.read_text()


@pytest.mark.parametrize(("drain", "added"), [("0", "1"), ("0.4", "1"), ("2.5", "3")])
def test_no_drain_is_too_short_for_vllm_to_go(run, drain, added):
    supervised = run("--dry-run", "--drain", drain)
    assert supervised.process.wait(120) == 0
    assert supervised.out.read_text().endswith(f"--shutdown-timeout {added}\n")


def test_a_shutdown_timeout_that_is_no_number_is_vllms_to_refuse(run):
    supervised = run("--dry-run", flags=("--shutdown-timeout", "abc"))
    assert supervised.process.wait(120) == 1
    supervised.said("will refuse it: --shutdown-timeout takes a whole number")


def test_the_final_settings_are_saved_as_a_script(run, tmp_path):
    script = tmp_path / "start.sh"
    supervised = run("--save", str(script), flags=("--max-model-len", "2048"), STAND_IN_KV_TOKENS="1000")
    supervised.said("saved as")
    supervised.end()
    assert "--max-model-len 1000" in script.read_text()
    assert os.access(script, os.X_OK)


def test_a_script_that_cannot_be_written_is_said_before_anything_starts(run, tmp_path):
    supervised = run("--save", str(tmp_path / "no/start.sh"))
    assert supervised.process.wait(120) == 2
    assert "--save" in supervised.err.read_text()
