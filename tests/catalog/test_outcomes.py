from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.explain.catalog import entry, with_outcomes
from legroom.explain.outcomes import Outcome, counted_by, outcomes_path, read_outcomes, record_outcome, total

WORKED = Outcome("kv_too_small_for_max_len", "LR203", "max_model_len", "0.20.0", True)
FAILED = Outcome("kv_too_small_for_max_len", "LR203", "lower_util", "0.20.0", False, "run")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    return tmp_path


def test_what_is_recorded_is_read_again() -> None:
    record_outcome(WORKED)
    record_outcome(FAILED)
    assert read_outcomes() == (WORKED, FAILED)
    assert total(read_outcomes()).rate == 0.5


def test_the_record_holds_labels_and_nothing_else() -> None:
    record_outcome(WORKED)
    line = json.loads(outcomes_path().read_text())
    assert set(line) == {"cause", "entry", "fix", "release", "worked", "reporter"}
    assert stat.S_IMODE(outcomes_path().stat().st_mode) == 0o600


def test_words_that_are_no_label_are_refused() -> None:
    with pytest.raises(LegroomError):
        record_outcome(Outcome("oom on /home/ann", "LR203", "max_model_len", "0.20.0", True))
    assert not outcomes_path().exists()


def test_damaged_lines_are_passed_over() -> None:
    record_outcome(WORKED)
    with outcomes_path().open("a") as file:
        file.write('{"cause": 1}\nnot json\n{"cause": "a", "entry": "b", "fix": "c", "release": "", "worked": "yes"}\n')
    assert read_outcomes() == (WORKED,)


def test_without_a_record_there_is_nothing_to_count() -> None:
    assert read_outcomes() == ()
    assert total(()).rate is None


def test_outcomes_are_counted_by_cause_the_most_tried_first() -> None:
    other = Outcome("no_cache_blocks", "LR201", "raise_util", "", True)
    counts = counted_by((other, WORKED, FAILED), "cause")
    assert list(counts) == ["kv_too_small_for_max_len", "no_cache_blocks"]
    assert counted_by((other,), "release") == counted_by((Outcome("a", "b", "c", "not known", True),), "release")


def test_the_catalogs_counts_include_what_was_tried_here() -> None:
    before = entry("LR203").counted("max_model_len")
    record_outcome(WORKED)
    after = with_outcomes(entry("LR203")).counted("max_model_len")
    assert (after.worked, after.failed, after.here) == (before.worked + 1, before.failed, 1)


def test_kinds_that_the_catalog_names_otherwise_are_counted_too() -> None:
    record_outcome(Outcome("cudagraph_capture_oom", "LR302", "eager_or_fewer_graphs", "", False))
    before = entry("LR302").counted("fewer_graphs")
    assert with_outcomes(entry("LR302")).counted("fewer_graphs").failed == before.failed + 1
