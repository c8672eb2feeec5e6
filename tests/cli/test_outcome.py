from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import main
from legroom.explain.outcomes import read_outcomes
from legroom.run.restart_policy import TriedFix

SHORT = (
    "INFO 01-02 03:04:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='acme/m'\n"
    "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in "
    "KV cache (40960).\n"
)
UP = (
    "INFO 01-02 03:04:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='acme/m'\n"
    "INFO:     Application startup complete.\n"
)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    (tmp_path / "old.log").write_text(SHORT)
    (tmp_path / "up.log").write_text(UP)
    return tmp_path


def test_an_outcome_is_recorded_without_a_word_of_the_log(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", str(logs / "old.log"), "--outcome", "worked", "--log", str(logs / "up.log"), "--json"]
    assert main(words) == 0
    recorded = json.loads(capsys.readouterr().out)["recorded"]
    assert recorded["fix"] == "max_model_len"
    assert recorded["release"] == "0.11.0"
    assert "acme" not in (logs / "home" / "outcomes.jsonl").read_text()


def test_a_log_that_says_otherwise_is_believed(logs: Path) -> None:
    assert main(["diagnose", str(logs / "old.log"), "--outcome", "failed", "--log", str(logs / "up.log")]) == 2
    assert main(["diagnose", str(logs / "old.log"), "--outcome", "worked", "--log", str(logs / "old.log")]) == 2
    assert read_outcomes() == ()


def test_a_log_without_a_failure_has_no_fix_to_judge(logs: Path) -> None:
    assert main(["diagnose", str(logs / "up.log"), "--outcome", "worked"]) == 2


def test_a_new_log_without_an_outcome_is_refused(logs: Path) -> None:
    assert main(["diagnose", str(logs / "old.log"), "--log", str(logs / "up.log")]) == 2


def test_a_run_records_the_fix_that_it_tried_once() -> None:
    said: list[str] = []
    tried = TriedFix("0.20.0", said.append)
    tried.end(worked=False)
    tried.begin({"cause": "no_cache_blocks", "entry": "LR201", "fix": "raise_util"})
    tried.end(worked=True)
    tried.end(worked=True)
    (outcome,) = read_outcomes()
    assert (outcome.fix, outcome.worked, outcome.reporter) == ("raise_util", True, "run")
    assert not said


def test_a_record_that_cannot_be_written_is_said_and_stops_nothing(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logs / "file").write_text("")
    monkeypatch.setenv("LEGROOM_HOME", str(logs / "file"))
    said: list[str] = []
    tried = TriedFix("0.20.0", said.append)
    tried.begin({"cause": "no_cache_blocks", "entry": "LR201", "fix": "raise_util"})
    tried.end(worked=True)
    assert len(said) == 1
