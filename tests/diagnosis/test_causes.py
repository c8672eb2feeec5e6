from __future__ import annotations

import sys
from pathlib import Path

import pytest
from diagnosis_logs import CAUSES

from legroom.diagnosis import causes as package
from legroom.diagnosis.causes import causes
from legroom.diagnosis.log_diagnosis import read_log
from legroom.render.diagnosis_text import diagnosis_text

FILES = sorted(path.stem for path in Path(package.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("what", CAUSES)
def test_a_log_is_put_down_to_its_cause(what: str) -> None:
    cause, log = CAUSES[what]
    findings = read_log([log.encode()]).runs[0].findings
    assert [finding.cause for finding in findings][:1] == [cause]


@pytest.mark.parametrize("what", CAUSES)
def test_every_finding_shows_its_proof_and_says_what_to_do(what: str) -> None:
    for finding in read_log([CAUSES[what][1].encode()]).runs[0].findings:
        assert finding.evidence
        assert finding.why
        assert finding.fixes
        assert finding.dead_ends or what.startswith("a CPU backend")  # its share is of the RAM that ran out
        assert 0 < finding.confidence <= 1


NEW_CAUSE = """
from legroom.diagnosis.causes import Cause
from legroom.diagnosis.finding import Assessment, DeadEnd, Fix, Strength, proof
from legroom.explain.entry import Localized

def examine(case):
    error = case.first("state_blocks_short")
    return Assessment(Strength.COMPARED, proof(error), "because") if error else None

def remedies(planner):
    yield planner.plan_change("max_num_seqs", {"max_num_seqs": 1}, "fewer")

CAUSE = Cause(
    entry="LR999", title=Localized("something new", "新"), phase="startup_kv", domain="host",
    dead_ends=(DeadEnd("wait", "it stays"),),
)
"""


def test_a_cause_is_added_by_putting_its_file_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brand_new.py").write_text(NEW_CAUSE, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    causes.cache_clear()
    try:
        diagnosis = read_log([CAUSES["too few state blocks"][1].encode()]).runs[0]
        assert (diagnosis.findings[0].cause, diagnosis.findings[0].entry) == ("brand_new", "LR999")
        assert (diagnosis.verdict, diagnosis.phase) == ("cause found", "startup_kv")
        assert diagnosis.findings[0].fixes[0].flags == {"max_num_seqs": 1}
        assert "error[LR999]: something new" in diagnosis_text(diagnosis)
    finally:
        monkeypatch.undo()
        sys.modules.pop(f"{package.__name__}.brand_new", None)
        causes.cache_clear()


def test_every_file_in_the_folder_is_a_cause_that_is_asked_and_tested() -> None:
    assert len(FILES) >= 24
    assert sorted(cause.label for cause in causes()) == FILES
    assert {cause for cause, _ in CAUSES.values()} == set(FILES)


def test_a_cause_has_an_entry_and_a_title_in_both_languages() -> None:
    assert all(cause.title.en != cause.title.zh for cause in causes())
    assert len({cause.entry for cause in causes()}) == len(FILES)


def test_of_equally_likely_causes_the_earlier_in_a_servers_life_is_named_first_and_no_memory_problem_last() -> None:
    entries = [cause.entry for cause in causes()]
    assert entries[:-1] == sorted(entries[:-1])
    assert causes()[-1].label == "not_memory"


def test_no_place_of_a_traceback_is_guessed_at_by_two_causes() -> None:
    sites = [site for cause in causes() for site in cause.usual_at]
    assert len(sites) == len(set(sites))
