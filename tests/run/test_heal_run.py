"""`legroom run` from end to end, on a stand-in with vLLM's process shape that is up in a tenth of a second."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import Any

import pytest
from held_run import until

from legroom.run.health import ServerAddress


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
    asking = threading.Thread(target=lambda: answers.append(held.request(40)))
    asking.start()
    held.received()
    assert held.end() == 0
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 40


def test_a_server_that_has_just_come_up_may_finish_its_requests_too(run, port):
    held = run("--no-verify")
    until(ServerAddress("127.0.0.1", port).is_healthy)  # legroom itself looks once a second
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


def test_a_port_in_use_is_said_before_anything_starts(run, port):
    with socket.create_server(("127.0.0.1", port)):
        held = run()
        assert held.process.wait(120) == 2
    assert "in use" in held.err.read_text()
    assert held.out.read_text() == ""


def test_a_server_that_never_becomes_healthy_is_stopped_with_its_last_lines(run):
    held = run("--ready-timeout", "2", STAND_IN_START_S="60")
    assert held.process.wait(120) != 0
    assert "not healthy after 2 s" in held.said("not healthy")
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
