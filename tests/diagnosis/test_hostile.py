from __future__ import annotations

import contextlib
import json

import pytest
from diagnosis_logs import CAUSES
from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.errors import LegroomError
from legroom.render.diagnosis_text import readings_text
from legroom.vllm_logs.log_scanner import all_marks

_LOGS = [log for _, log in CAUSES.values()]


def whole_path(data: bytes) -> None:
    """Everything that a call of the command does with a log."""
    reading = read_log([data])
    json.dumps(readings_json([reading]))
    readings_text([reading], all_runs=True)
    readings_text([reading], language="zh")


@given(st.binary(max_size=3000))
def test_any_bytes_are_survived(data: bytes) -> None:
    with contextlib.suppress(LegroomError):  # bytes that begin like a black box and are none
        whole_path(data)


@given(
    st.lists(
        st.sampled_from(
            [
                *(mark.decode() for mark in all_marks()),
                "\n",
                " ",
                "(",
                ")",
                "12",
                "1.5 GiB",
                "{",
                "}",
                "'",
                "\x1b[0m",
                "%",
                ":",
            ]
        ),
        max_size=60,
    )
)
def test_any_mixture_of_marks_is_survived(parts: list[str]) -> None:
    whole_path("".join(parts).encode())


@given(st.sampled_from(_LOGS), st.sampled_from(_LOGS), st.integers(0, 400), st.characters(), st.integers(0, 400))
def test_logs_cut_and_joined_anywhere_are_survived(log: str, other: str, cut: int, letter: str, place: int) -> None:
    text = log[:cut] + letter + other[place:]
    whole_path(text.encode("utf-8", "surrogatepass"))


@given(
    st.sampled_from(["max_seq_len", "tensor_parallel_size", "max_num_seqs", "block_size", "gpu_memory_utilization"]),
    st.sampled_from(["0", "-7", "1e99", "99999999999999999999", "'x'", "None", "0.0001", "[1]", "nan"]),
)
def test_flags_that_no_server_can_have_are_survived(name: str, value: str) -> None:
    log = (
        f"INFO 01-02 03:04:00 [utils.py:328] non-default args: {{'model': 'llama-3.1-8b', '{name}': {value}}}\n"
        "INFO 01-02 03:04:00 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='llama-3.1-8b', "
        f"{name}={value}, dtype=torch.bfloat16\n" + CAUSES["a context longer than the pool"][1]
    )
    reading = read_log([log.encode()], "log", Hints(gpu="l4"))
    assert reading.runs[0].findings[0].cause == "kv_too_small_for_max_len"


@given(st.from_regex(r"[0-9.,e+-]{1,40}", fullmatch=True))
def test_numbers_of_any_size_are_survived(number: str) -> None:
    numbers = ("a context longer than the pool", "too few state blocks", "less free than asked for")
    log = "\n".join(CAUSES[what][1] for what in (*numbers, "a process that grows"))
    whole_path(log.replace("5", number).encode())


@pytest.mark.parametrize(
    "piece",
    ["(", "a ", "█ model ", "Process 1 has 1 GiB memory in use. ", "'\\", "total capacity of ", "--", "{", "prompt: '"],
)
def test_a_hostile_line_costs_no_more_than_its_length(piece: str) -> None:
    # Quadratic matching of 50 kB would take a minute: that this test ends is what it shows.
    line = "CUDA out of memory. Tried to allocate 1 GiB. non-default args: {" + piece * (50_000 // len(piece))
    whole_path(line.encode())


@pytest.mark.parametrize("marks", [1, 900, 2000])
def test_what_follows_a_line_full_of_marks_is_read(marks: int) -> None:
    _, log = CAUSES["a context longer than the pool"]
    reading = read_log([f"{'GPU KV cache size ' * marks}\nplain\n{log}\n".encode()])
    assert reading.runs[0].findings[0].cause == "kv_too_small_for_max_len"
    assert reading.runs[0].findings[0].evidence[0].line == 3
    assert reading.lines == 3


def test_a_log_cannot_steer_the_terminal_that_shows_its_diagnosis() -> None:
    line = "a\x1b]0;t\x07b\x9b31mc\u202ed\u2066e torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    shown = readings_text([read_log([line.encode()])])
    assert "torch.OutOfMemoryError" in shown
    assert all(letter.isprintable() for letter in shown.replace("\n", ""))
