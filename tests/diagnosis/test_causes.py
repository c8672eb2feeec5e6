from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from diagnosis_logs import CAUSES

from legroom.diagnosis import causes as package
from legroom.diagnosis.causes import causes
from legroom.diagnosis.diagnose import read_log

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
        assert finding.dead_ends
        assert 0 < finding.confidence <= 1


def test_every_file_in_the_folder_is_a_cause_that_is_asked_and_tested() -> None:
    assert len(FILES) >= 24
    assert sorted(cause.label for cause in causes()) == FILES
    assert {cause for cause, _ in CAUSES.values()} == set(FILES)


def test_a_cause_is_named_like_its_file_and_has_an_entry_and_a_title_in_both_languages() -> None:
    for name in FILES:
        cause = importlib.import_module(f"{package.__name__}.{name}").CAUSE
        assert cause.label == name
        assert cause.title.en != cause.title.zh
    assert len({cause.entry for cause in causes()}) == len(FILES)


def test_of_equally_likely_causes_the_earlier_in_a_servers_life_is_named_first_and_no_memory_problem_last() -> None:
    entries = [cause.entry for cause in causes()]
    assert entries[:-1] == sorted(entries[:-1])
    assert causes()[-1].label == "not_memory"


def test_no_place_of_a_traceback_is_guessed_at_by_two_causes() -> None:
    sites = [site for cause in causes() for site in cause.usual_at]
    assert len(sites) == len(set(sites))
