"""The patterns on Python's own engine: the same answers, and bounded time whatever the text."""

from __future__ import annotations

import re
import time
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from diagnosis_logs import CAUSES

from legroom import regex
from legroom.diagnosis.diagnose import read_log
from legroom.diagnosis.diagnosis_json import readings_json
from legroom.explain.catalog import entries
from legroom.facts.log_messages import message_patterns
from legroom.regex import MOST_CHARS, BoundedPattern, Re2Finder, TextFinder
from legroom.vllm_logs import evidence, log_masking, startup_log
from legroom.vllm_logs.log_masking import MASK, masked
from legroom.vllm_logs.log_scanner import every_mark
from legroom.vllm_logs.startup_log import startup_lines

_CACHED = (regex.compiled, evidence._all_patterns, evidence._pattern, startup_log._startup_patterns)
HOSTILE = ("9", "9.", "a ", "1GiB->", "deep_ep", "cudaHostAlloc", "ValueError: ", "eyJaaaaaaaaaa-", "memory ", "://")


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


@pytest.mark.usefixtures("without_re2")
@pytest.mark.parametrize("piece", HOSTILE)
def test_no_line_takes_long(piece: str) -> None:
    began = time.process_time()
    read_log([(piece * (20_000 // len(piece)) + "\n").encode()])
    assert time.process_time() - began < 10


@pytest.mark.parametrize("pattern", ["(a+)+b", "(?:.*a)*c", r"(\w+\.?)*$", "(?:a*)*"])
def test_a_pattern_that_could_take_exponential_time_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="exponential"):
        BoundedPattern(pattern)


def test_digits_words_and_spaces_are_ascii_as_in_re2() -> None:
    assert BoundedPattern(r"\d").search("٣") is None


def test_a_match_deep_in_a_long_line_is_found() -> None:
    match = BoundedPattern(r"(?i:free) memory (?P<gib>[\d.]+)").search("x" * (3 * MOST_CHARS) + " Free memory 1.5 GiB")
    assert match is not None
    assert match["gib"] == "1.5"


@pytest.mark.usefixtures("without_re2")
def test_secrets_of_long_texts_are_masked() -> None:
    text = " ".join(f"token=abcdefgh{number}" for number in range(2000))
    assert "abcdefgh" not in masked(text)
    assert masked(text).count(MASK) == 2000


def test_the_finder_finds_what_re2_finds() -> None:
    text = "\n".join(log for _, log in CAUSES.values()).encode()
    by_re2 = {at for at, _ in Re2Finder(every_mark()).find(text, 0, len(text))}
    in_order = [at for at, _ in TextFinder(every_mark()).find(text, 0, len(text))]
    assert by_re2 <= set(in_order)
    assert in_order == sorted(in_order)


def every_pattern() -> list[str]:
    """All that meets a foreign text: messages, start-up lines, what is masked, and the catalog's signatures."""
    messages = [evidence._pattern(message) for message in message_patterns()]
    startups = [startup_log._linear(form.pattern.pattern)[0] for form in startup_lines()]
    signatures = [signature.pattern for entry in entries() for signature in entry.signatures]
    return [*messages, *startups, *log_masking._SECRETS, log_masking._PROMPT, log_masking._LINK, *signatures]


def shortest_match(tree: Any) -> str:
    """A text that a pattern matches, with every repetition run at least once."""
    pieces = []
    for operation, argument in tree:
        if operation is _constants.LITERAL:
            pieces.append(chr(argument))
        elif operation is _constants.IN:
            pieces.append(of_class(argument))
        elif operation is _constants.BRANCH:
            pieces.append(shortest_match(argument[1][0]))
        elif operation is _constants.SUBPATTERN:
            pieces.append(shortest_match(argument[3]))
        elif operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            pieces.append(shortest_match(argument[2]) * max(argument[0], 1))
        elif operation is _constants.ANY:
            pieces.append("9")
    return "".join(pieces)


def of_class(members: Any) -> str:
    for text in ("9", "a", " ", ".", "/", "-", "'"):
        for operation, argument in members:
            if operation is _constants.LITERAL and chr(argument) == text:
                return text
            if operation is _constants.RANGE and argument[0] <= ord(text) <= argument[1]:
                return text
            if operation is _constants.CATEGORY and re.match(CLASSES[argument], text):
                return text
    return "9"


CLASSES = {
    _constants.CATEGORY_DIGIT: r"\d",
    _constants.CATEGORY_WORD: r"\w",
    _constants.CATEGORY_SPACE: r"\s",
    _constants.CATEGORY_NOT_DIGIT: r"\D",
    _constants.CATEGORY_NOT_WORD: r"\W",
    _constants.CATEGORY_NOT_SPACE: r"\S",
}


def test_no_pattern_of_the_set_takes_long_on_texts_made_against_it() -> None:
    slow = {}
    for pattern in dict.fromkeys(every_pattern()):
        bounded, seed = BoundedPattern(pattern), shortest_match(_parser.parse(pattern, re.ASCII))
        for text in (seed, seed[:-1], seed[: len(seed) // 2 + 1], seed + " ", *HOSTILE):
            attack = (text * (MOST_CHARS // max(len(text), 1) + 1))[: MOST_CHARS - 1] + "\0"
            began = time.process_time()
            bounded.search(f"{seed[:-1]}{attack}")
            took = time.process_time() - began
            if took > 0.5:
                slow[pattern] = took
    assert not slow
