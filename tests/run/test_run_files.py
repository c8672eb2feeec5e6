"""A start script, a run's note and its log: what is secret stays out of files, or for its user alone."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from legroom.actions import server_log
from legroom.actions.server_log import ServerLog
from legroom.cli import main as cli
from legroom.run.run_file import RunFile, save_script, script

WORDS = ["echo", "serve", "m", "--api_key", "hush1", "--hf-tok=hush2", "--otlp-traces-endpoint", "http://u:hush3@c"]
ENV = {"HF_TOKEN": "hush4", "HTTPS_PROXY": "http://u:hush5@p:1", "OMP_NUM_THREADS": "1"}


def test_a_script_asks_for_every_secret_instead_of_keeping_it():
    text = script(WORDS, ENV)
    assert "hush" not in text
    for name in ("VLLM_API_KEY", "HF_TOKEN", "HTTPS_PROXY", "OTLP_TRACES_ENDPOINT"):
        assert f'"${{{name}:?' in text


def test_a_script_runs_once_its_secrets_are_set():
    given = dict.fromkeys(("VLLM_API_KEY", "HF_TOKEN", "HTTPS_PROXY"), "x y") | {"OTLP_TRACES_ENDPOINT": "http://c"}
    done = subprocess.run(["bash", "-c", script(WORDS, ENV)], capture_output=True, text=True, env=given, check=True)
    assert done.stdout == "serve m --otlp-traces-endpoint http://c\n"
    assert subprocess.run(["bash", "-c", script(WORDS, ENV)], capture_output=True, env={}, check=False).returncode != 0


def test_a_path_that_is_no_text_is_saved_as_it_is(tmp_path):
    assert save_script(str(tmp_path / "s.sh"), ["echo", "na\udcefve"], {}) == f"saved as {tmp_path}/s.sh"
    assert subprocess.run([tmp_path / "s.sh"], capture_output=True, check=True).stdout == b"na\xefve\n"


def test_the_note_of_a_run_is_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    file = RunFile(1)
    assert file.write({"command": ["--api-key", "k"]}) == ""
    assert json.loads(file.path.read_text())["command"][1] == "k"
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_log_stays_for_its_user_alone_when_it_is_shortened(tmp_path, monkeypatch):
    monkeypatch.setattr(server_log, "TAIL_BYTES", 100)
    log = ServerLog(tmp_path / "log")
    log.started()
    for _ in range(30):
        log.write(b"0123456789\n")
    log.close()
    assert b"left out" in log.path.read_bytes()
    assert log.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "words", [["--api-key", "topsecret"], ["http://u:topsecret@h"], ["--", "A_TOKEN=topsecret", "--api_k", "topsecret"]]
)
def test_a_bug_is_reported_without_the_keys_of_the_call(words, monkeypatch, capsys):
    def fails(_: object) -> int:
        raise RuntimeError("asked http://u:topsecret@h")

    monkeypatch.setattr(cli, "_run_command", fails)
    assert cli.main(["verify", *words]) == 70
    error = capsys.readouterr().err
    assert "is a bug" in error and "RuntimeError" in error
    assert "topsecret" not in error


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system without a free byte."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here: it takes root")
    try:
        with contextlib.suppress(OSError), (place / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(b"x" * 4096)
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_on_a_full_disk_a_failed_start_is_diagnosed_and_fixed_all_the_same(run, full_disk):
    flags = ("--max-model-len", "2048")
    supervised = run("--no-verify", flags=flags, STAND_IN_KV_TOKENS="1000", LEGROOM_HOME=str(full_disk))
    supervised.serving()
    assert "Changed: --max-model-len 1000 (was 2048)" in supervised.said("try 1 of 3")
    assert supervised.said("its newest lines are kept in memory")
    assert supervised.end() == 0


def test_on_a_full_disk_the_record_of_a_run_takes_the_place_of_the_one_before(full_disk, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(full_disk))
    lines: list[str] = []
    (full_disk / "ballast").unlink()
    file = RunFile(8000)
    file.record({"state": "serving"}, lines.append)
    with contextlib.suppress(OSError), (full_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)
    file.record({"state": "restarting"}, lines.append)
    assert json.loads(file.path.read_text())["state"] == "restarting"
    assert lines == []


def test_a_record_that_found_no_room_is_written_once_there_is_some(full_disk, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(full_disk))
    lines: list[str] = []
    file = RunFile(8000)
    file.record({"state": "serving"}, lines.append)
    file.retry_write()
    assert [path.name for path in file.path.parent.iterdir()] == []
    assert ["cannot be written" in line for line in lines] == [True]
    (full_disk / "ballast").unlink()
    file.retry_write()
    assert json.loads(file.path.read_text())["state"] == "serving"
