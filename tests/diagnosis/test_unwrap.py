from __future__ import annotations

import textwrap

import pytest
from diagnosis_logs import CAUSES, CORE, FULL_OF_WEIGHTS, trace
from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.diagnose import read_log
from legroom.diagnosis.lines import line_width, unwrapped

NOT_FREE = CORE + CAUSES["less free than asked for"][1]
TRACE = trace("load_model", "initialize_model", "create_weights", error=FULL_OF_WEIGHTS)


def wrapped(text: str, columns: int) -> str:
    return "\n".join(line[at : at + columns] for line in text.split("\n") for at in range(0, len(line) or 1, columns))


def whole(text: str) -> str:
    return b"".join(unwrapped([text.encode()])).decode()


@pytest.mark.parametrize("columns", [72, 80, 100, 120, 133])
def test_a_message_broken_at_any_width_is_made_whole(columns: int) -> None:
    assert [line for line in whole(wrapped(TRACE, columns)).split("\n") if line] == TRACE.split("\n")


def test_a_number_broken_in_the_middle_is_read() -> None:
    at = NOT_FREE.index("30.12") + 3
    finding = read_log([wrapped(NOT_FREE, at).encode()]).runs[0].findings[0]
    assert finding.evidence[0].facts["free_bytes"] == round(30.12 * 2**30)


def test_a_message_broken_between_words_is_made_whole() -> None:
    assert NOT_FREE in whole("\n".join(textwrap.wrap(NOT_FREE, 80, break_on_hyphens=False)))


def test_evidence_keeps_the_line_number_of_the_text_as_given() -> None:
    text = wrapped(f"{TRACE}\n{NOT_FREE}", 80)
    first = wrapped(TRACE, 80).count("\n") + 2
    case = read_log([text.encode()]).runs[0].case
    check = case.first("free_below_desired")
    assert check is not None and check.line == first


def test_a_chain_that_goes_on_in_the_next_piece_is_not_lost() -> None:
    text = wrapped("\n".join([TRACE] * 3), 80).encode()
    pieces = [text[:400], *(text[at : at + 97] for at in range(400, len(text), 97))]
    joined = b"".join(unwrapped(pieces)).decode()
    assert [line for line in joined.split("\n") if line] == "\n".join([TRACE] * 3).split("\n")


def test_rows_of_a_table_are_not_joined() -> None:
    rows = "\n".join(f"root  {pid}  12.0  3.1  99999999  {rss}00000 ?  Sl  Jan02  1:00 " + "x" * 60 for pid, rss in
                     ((11, 10), (11, 20), (11, 30)))  # fmt: skip
    assert whole(rows) == rows


def test_lines_as_they_were_written_stay_as_they_are() -> None:
    assert line_width(TRACE) is None
    assert whole(TRACE) == TRACE


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=400))
def test_no_text_loses_lines(text: str) -> None:
    assert whole(text).count("\n") == text.count("\n")
