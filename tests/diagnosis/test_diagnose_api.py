from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis_logs import CAUSES
from hypothesis import given
from hypothesis import strategies as st

import legroom
from legroom.errors import LegroomError

SHORT_KV = CAUSES["a context longer than the pool"][1]


def test_a_text_is_diagnosed_and_shows_itself() -> None:
    answer = legroom.diagnose(SHORT_KV)
    assert answer.findings[0].cause == "kv_too_small_for_max_len"
    assert "error[LR203]" in str(answer)
    assert answer.json()["verdict"] == "cause found"


def test_a_file_is_diagnosed(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(SHORT_KV, encoding="utf-8")
    assert legroom.diagnose(path).findings[0].entry == "LR203"


def test_a_string_that_names_a_file_is_read_as_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.log").write_text(SHORT_KV, encoding="utf-8")
    assert legroom.diagnose(str(tmp_path / "c.log")).findings[0].entry == "LR203"
    monkeypatch.chdir(tmp_path)
    answer = legroom.diagnose("c.log")
    assert answer.findings[0].entry == "LR203"
    assert answer.reading.source == "c.log"


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.log").write_text(SHORT_KV, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert legroom.diagnose("~/c.log").findings[0].entry == "LR203"


def test_a_text_with_a_newline_is_a_log_even_if_nothing_in_it_is_known() -> None:
    assert legroom.diagnose("hello\nworld").json()["verdict"] == "not understood"


@pytest.mark.parametrize("name", ["c.log", "logs/no such file.log", "torch.OutOfMemoryError"])
def test_a_file_that_is_not_there_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(LegroomError, match="there is no file") as error:
        legroom.diagnose(name)
    assert "path" in str(error.value.hint)


@pytest.mark.parametrize("nothing", ["", "  "])
def test_an_empty_text_is_said_to_be_empty(nothing: str) -> None:
    with pytest.raises(LegroomError, match="empty"):
        legroom.diagnose(nothing)


def test_a_folder_is_told_from_a_log(tmp_path: Path) -> None:
    with pytest.raises(LegroomError, match="is a directory"):
        legroom.diagnose(str(tmp_path))


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        legroom.diagnose(text).json()
    except LegroomError as error:
        assert error.hint
