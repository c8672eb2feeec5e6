from __future__ import annotations

import pytest
from diagnosis_logs import CAUSES

from legroom.diagnosis.causes import NAMES, causes
from legroom.diagnosis.diagnose import read_log
from legroom.facts.diagnosis_texts import cause_title


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


def test_every_cause_is_tested() -> None:
    assert {cause for cause, _ in CAUSES.values()} == set(NAMES)


def test_causes_have_a_file_a_label_an_entry_and_words_in_both_languages() -> None:
    assert [cause.CAUSE for cause in causes()] == list(NAMES)
    assert len({cause.ENTRY for cause in causes()}) == len(NAMES)
    for name in NAMES:
        assert cause_title(name, "en") != cause_title(name, "zh")
