"""The words of `legroom run`: its own options, and where the server's command begins."""

from __future__ import annotations

import pytest

from legroom.cli.main import main


@pytest.fixture
def said(monkeypatch):
    """What the options come to, without starting anything."""
    seen = {}

    def ask(task, question):
        seen["question"] = question
        return {
            "words": list(question["words"]), "env": {}, "vllm": "0.32.0", "model": "m", "line": "vllm serve m",
            "gpus": {"name": ""}, "expected": {"text": "nothing", "verdict": "unknown"}, "notes": [],
        }  # fmt: skip

    class Supervisor:
        def __init__(self, options, prepared, say):
            seen["options"] = options

        def run(self):
            return 0

    monkeypatch.setattr("legroom.holding.asking.ask", ask)
    monkeypatch.setattr("legroom.holding.launch.Supervisor", Supervisor)
    return seen


def test_what_follows_the_dashes_is_the_servers(said):
    assert main(["run", "--tries", "2", "--", "vllm", "serve", "m", "--tries", "5"]) == 0
    assert said["options"].words == ("vllm", "serve", "m", "--tries", "5")
    assert said["options"].tries == 2


def test_the_dashes_may_be_left_out(said):
    assert main(["run", "--drain=5", "vllm", "serve", "m", "--port", "1"]) == 0
    assert said["options"].words == ("vllm", "serve", "m", "--port", "1")
    assert said["options"].drain_s == 5


def test_flags_to_keep_may_be_written_either_way(said):
    main(["run", "--keep", "--max-model-len", "--keep=max_num_seqs", "--keep", "VLLM_CPU_KVCACHE_SPACE", "--", "vllm"])
    assert said["options"].keep == ("max_model_len", "max_num_seqs", "VLLM_CPU_KVCACHE_SPACE")


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
