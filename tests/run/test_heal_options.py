"""The words of `legroom run`: its own options, and where the server's command begins."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from forked import legroom

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.run.tasks import keep_option_name


@pytest.fixture
def said(monkeypatch):
    """What the options come to, without starting anything."""
    seen = {}

    def run_task(task, question):
        seen["question"] = question
        return {
            "words": list(question["words"]),
            "env": {},
            "vllm": "0.32.0",
            "model": "m",
            "line": "vllm serve m",
            "gpus": {"name": ""},
            "expected": {"text": "nothing", "verdict": "unknown"},
            "notes": [],
        }

    class Supervisor:
        def __init__(self, options, prepared, say):
            seen["options"] = options

        def run(self):
            return 0

    monkeypatch.setattr("legroom.cli.run.run_task", run_task)
    monkeypatch.setattr("legroom.cli.run.Supervisor", Supervisor)
    return seen


def test_what_follows_the_dashes_is_the_servers(said):
    assert main(["run", "--tries", "2", "--", "vllm", "serve", "m", "--tries", "5"]) == 0
    assert said["options"].words == ("vllm", "serve", "m", "--tries", "5")
    assert said["options"].tries == 2


def test_the_dashes_may_be_left_out(said):
    assert main(["run", "--drain=5", "vllm", "serve", "m", "--port", "1"]) == 0
    assert said["options"].words == ("vllm", "serve", "m", "--port", "1")
    assert said["options"].drain_s == 5


def test_what_to_keep_is_asked_as_it_was_written(said):
    main(["run", "--keep", "--max-model-len", "--keep=max_num_seqs", "--keep", "-tp", "--", "vllm"])
    assert said["question"]["keep"] == ("--max-model-len", "max_num_seqs", "-tp")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--max-model-len", "max_model_len"),
        ("max_model_len", "max_model_len"),
        ("--max-model", "max_model_len"),
        ("MAX-MODEL-LEN", "max_model_len"),
        ("MAX_MODEL_LEN", "max_model_len"),
        ("-tp", "tensor_parallel_size"),
        ("--no-enable-prefix-caching", "enable_prefix_caching"),
        ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE"),
        ("SEEDS", "SEEDS"),
    ],
)
def test_a_flag_to_keep_may_be_written_in_any_way(written, meant):
    assert keep_option_name(written) == meant


@pytest.mark.parametrize(
    ("written", "near"), [("--max-modle-len", "--max-model-len"), ("--nosuchflag", ""), ("-x", "")]
)
def test_a_flag_to_keep_that_vllm_does_not_have_is_refused(written, near):
    with pytest.raises(LegroomError, match="no such flag") as error:
        keep_option_name(written)
    assert near in error.value.hint
    assert error.value.exit_code == 2


@pytest.fixture
def failing(tmp_path, port):
    """The words of a run whose server ends with 5 at once."""
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\nexit 5\n")
    vllm.chmod(0o755)
    return ["run", "--vllm", "0.32.0", "--", str(vllm), "serve", "m", "--port", str(port)]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_streams_that_are_closed_do_no_harm(closed, failing, tmp_path):
    env = {"LEGROOM_HOME": str(tmp_path / "home")}
    assert legroom(failing, tmp_path / "out", tmp_path / "err", env, closed=closed).wait() == 5


def test_streams_that_a_shell_closed_do_no_harm(failing, tmp_path):
    line = f"{shlex.join([sys.executable, '-m', 'legroom', *failing])} <&- >&- 2>&-"
    env = {**os.environ, "LEGROOM_HOME": str(tmp_path / "home")}
    assert subprocess.run(["sh", "-c", line], env=env, capture_output=True, check=False).returncode == 5


def test_lengths_may_be_written_short(said):
    main(["run", "--min-context", "8k", "--", "vllm", "serve", "m"])
    assert said["options"].min_context == 8192


@pytest.mark.parametrize(
    "words",
    [
        ["--tries", "many"],
        ["--tries", "-1"],
        ["--drain", "soon"],
        ["--ready-timeout", "nan"],
        ["--min-context", "long"],
        ["--on-crash", "panic"],
        ["--max-model-len", "4"],
        ["--keep"],
    ],
)
def test_an_option_that_makes_no_sense_is_refused(said, words, capsys):
    assert main(["run", *words, "--", "vllm", "serve", "m"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert "options" not in said


def test_a_dry_run_prints_the_command_alone(said, capsys):
    assert main(["run", "--dry-run", "--", "vllm", "serve", "m"]) == 0
    assert capsys.readouterr().out == "vllm serve m\n"
    assert "options" not in said
