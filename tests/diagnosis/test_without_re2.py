"""Without RE2, as in the browser, `re` gives the same answers."""

from __future__ import annotations

import pytest
from diagnosis_logs import CAUSES

from legroom import regex
from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.log_diagnosis import read_log
from legroom.regex import LiteralFinder, PatternSet
from legroom.vllm_logs import evidence, startup_log
from legroom.vllm_logs.log_masking import MASK, masked_log_text
from legroom.vllm_logs.log_scanner import all_marks

_CACHED = (regex.compiled, evidence._message_pattern_set, evidence._message_pattern, startup_log._startup_patterns)


@pytest.fixture
def without_re2(monkeypatch: pytest.MonkeyPatch):
    for cached in _CACHED:
        cached.cache_clear()
    monkeypatch.setattr(regex, "re2", None)
    yield
    for cached in _CACHED:
        cached.cache_clear()


def answers() -> dict[str, object]:
    return {name: readings_json([read_log([log.encode()])]) for name, (_, log) in CAUSES.items()}


def test_every_cause_is_found_alike(request: pytest.FixtureRequest) -> None:
    with_re2 = answers()
    request.getfixturevalue("without_re2")
    assert answers() == with_re2


def test_each_pattern_of_a_set_is_matched_by_its_number(request: pytest.FixtureRequest) -> None:
    words = [f"word{number:03}" for number in range(80)]
    text = f"{words[79]} {words[0]} and {words[24]}, {words[25]}, {words[26]}"
    by_re2 = PatternSet((word, (word,)) for word in words).matching(text)
    request.getfixturevalue("without_re2")
    assert by_re2 == PatternSet((word, (word,)) for word in words).matching(text) == (0, 24, 25, 26, 79)


@pytest.mark.usefixtures("without_re2")
def test_secrets_of_long_texts_are_masked() -> None:
    text = " ".join(f"token=abcdefgh{number}" for number in range(2000))
    assert "abcdefgh" not in masked_log_text(text)
    assert masked_log_text(text).count(MASK) == 2000


def literals_found(text: bytes) -> list[int]:
    return [at for at, _ in LiteralFinder(all_marks()).find(text, 0, len(text))]


def test_the_same_lines_are_found(request: pytest.FixtureRequest) -> None:
    text = "\n".join(log for _, log in CAUSES.values()).encode()
    by_re2 = literals_found(text)
    request.getfixturevalue("without_re2")
    by_find = literals_found(text)
    assert set(by_re2) <= set(by_find)
    assert by_find == sorted(by_find)
