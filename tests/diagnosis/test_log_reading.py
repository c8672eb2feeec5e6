from __future__ import annotations

import gzip
import json
import textwrap
from pathlib import Path

import pytest
from diagnosis_logs import CAUSES, CORE, FULL_OF_WEIGHTS, READY, SIZED, trace
from hypothesis import given
from hypothesis import strategies as st

from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.errors import LegroomError
from legroom.vllm_logs.lines import line_width, rejoin_lines
from legroom.vllm_logs.log_scanner import MAX_LINES_PER_MARK, Scanner, all_marks
from legroom.vllm_logs.log_sources import pieces_of_file

SHORT_KV = CAUSES["a context longer than the pool"][1]
BANNER = (
    "INFO 01-02 03:00:00 [core.py:58] Initializing a V1 LLM engine "
    "(v0.9.2) with config: model='org/model', max_seq_len=8192"
)
NOT_FREE = CORE + CAUSES["less free than asked for"][1]
TRACE = trace("load_model", "initialize_model", "create_weights", error=FULL_OF_WEIGHTS)


def read(text: str) -> LogReading:
    return read_log([text.encode()])


def first_cause(text: str) -> str:
    return read(text).runs[0].findings[0].cause


@pytest.mark.parametrize(
    "prefix",
    [
        "vllm-1  | ",
        "[pod/vllm-0/server] ",
        "2025-01-02T03:04:05.123456789Z ",
        "2025-01-02T03:04:05.123456789Z stderr F ",
        "Jan 02 03:04:05 gpu7 vllm[812]: ",
        "(EngineCore_DP0 pid=77) ERROR 01-02 03:04:05 [core.py:708] ",
        "(RayWorkerWrapper pid=812, ip=10.0.0.7) ",
        "[rank0]: ",
        "\x1b[1;36m(Worker_TP0 pid=5)\x1b[0;0m ",
    ],
)
def test_what_platforms_put_in_front_of_lines_does_not_matter(prefix: str) -> None:
    wrapped = CAUSES["a context longer than the pool, wrapped"][1]
    assert first_cause("\n".join(prefix + line for line in wrapped.splitlines())) == "kv_too_small_for_max_len"


@pytest.mark.parametrize("prefix", ["", "vllm-1  | ", "Jan 02 03:04:05 gpu7 legroom[812]: "])
def test_what_legroom_run_expects_is_not_taken_for_what_vllm_said(prefix: str) -> None:
    expected = f"{prefix}legroom: plan for org/model: it will not start: {SHORT_KV}"
    assert first_cause(f"{expected}\n{CAUSES['an illegal address'][1]}") == "not_memory"
    assert read(expected).runs == ()


def test_a_message_over_several_json_lines_is_read() -> None:
    lines = CAUSES["a context longer than the pool, wrapped"][1].splitlines()
    log = "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines)
    assert first_cause(log) == "kv_too_small_for_max_len"


def test_json_logs_are_read() -> None:
    log = json.dumps({"time": "2025-01-02", "level": "error", "message": SHORT_KV})
    evidence = read(log).runs[0].findings[0].evidence[0]
    assert evidence.facts["needed_bytes"] == 8 * 2**30


def test_evidence_says_who_and_when_and_where() -> None:
    log = "hello\n(VllmWorker rank=3 pid=15164) ERROR 06-19 07:06:13 [multiproc_executor.py:527] " + FULL_OF_WEIGHTS
    evidence = read(log).runs[0].findings[0].evidence[0]
    assert (evidence.line, evidence.rank, evidence.pid, evidence.time) == (2, 3, 15164, "06-19 07:06:13")


def test_the_first_failure_in_time_wins_over_the_louder_one() -> None:
    log = "\n".join([SHORT_KV, *["RuntimeError: NCCL error: unhandled cuda error"] * 9])
    assert first_cause(log) == "kv_too_small_for_max_len"


def test_every_restart_is_diagnosed_the_last_one_first() -> None:
    log = "\n".join([BANNER, SHORT_KV, BANNER, CAUSES["too few state blocks"][1]])
    assert [run.findings[0].cause for run in read(log).runs] == ["hybrid_state_cache_limit", "kv_too_small_for_max_len"]


def test_a_restart_that_says_nothing_yet_does_not_hide_the_failure_before_it() -> None:
    assert first_cause("\n".join([BANNER, SHORT_KV, BANNER])) == "kv_too_small_for_max_len"


def test_a_healthy_log_is_called_healthy_and_its_memory_reported() -> None:
    run = read("\n".join([BANNER, SIZED, READY])).runs[0]
    assert run.verdict == "no problem found"
    assert run.case.startup.tokens == 98304


def test_hints_that_healthy_servers_print_are_no_causes() -> None:
    hints = (
        "INFO 07-08 13:05:31 model_runner.py:928] CUDA graphs can "
        "take additional 1~3 GiB memory per GPU. If you are running "
        "out of memory, consider decreasing `gpu_memory_utilization` or enforcing eager mode.\n"
        "UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown"
    )
    assert read("\n".join([BANNER, SIZED, hints, READY])).runs[0].verdict == "no problem found"


def test_what_users_ask_the_model_about_is_not_evidence() -> None:
    asked = f"INFO 01-02 03:04:05 [logger.py:43] Received request cmpl-1: prompt: 'why {FULL_OF_WEIGHTS} ?', params: x"
    assert read("\n".join([READY, asked])).runs[0].verdict == "no problem found"


def test_a_log_of_another_program_is_not_understood() -> None:
    assert read("GET /index.html 200\nGET /favicon.ico 404\n").runs == ()


def test_a_truncated_last_line_still_counts() -> None:
    assert first_cause(f"{READY}\n{SHORT_KV[:180]}") == "kv_too_small_for_max_len"


@given(st.lists(st.integers(1, 4000), max_size=12))
def test_where_the_pieces_are_cut_does_not_matter(cuts: list[int]) -> None:
    log = "\n".join([BANNER, *["nothing here"] * 30, SIZED, *["still nothing"] * 30, SHORT_KV, "the end"]).encode()
    pieces, start = [], 0
    for size in cuts:
        pieces.append(log[start : start + size])
        start += size
    reading = read_log([*pieces, log[start:]])
    assert reading.lines == log.count(b"\n") + 1
    finding = reading.runs[0].findings[0]
    assert (finding.cause, finding.evidence[0].line) == ("kv_too_small_for_max_len", 63)


def test_a_line_of_many_megabytes_is_read_around_its_marks() -> None:
    line = b"x" * (5 << 20) + b" " + CAUSES["too few state blocks"][1].encode() + b" " + b"y" * (5 << 20)
    pieces = [line[at : at + (1 << 20)] for at in range(0, len(line), 1 << 20)]
    assert read_log(pieces).runs[0].findings[0].cause == "hybrid_state_cache_limit"


def test_a_mark_that_is_everywhere_is_sampled_and_the_rest_still_found() -> None:
    flood = "INFO 01-02 03:04:05 x.py:1] NCCL WARN Cuda failure? no.\n" * (MAX_LINES_PER_MARK + 2000)
    scanner = Scanner()
    passages = list(scanner.passages([(flood + SHORT_KV + "\n" + flood).encode()]))
    assert len(passages) < MAX_LINES_PER_MARK + 2100
    assert any("To serve at least one request" in passage.line.text for passage in passages)


def test_every_message_can_be_stopped_at() -> None:
    assert all(len(mark) >= 3 for mark in all_marks())


def test_packed_files_are_read_as_they_are(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(SHORT_KV.encode()))
    (tmp_path / "a.log.zst").write_bytes(zstandard.compress(SHORT_KV.encode()))
    (tmp_path / "a16.log").write_text(SHORT_KV, encoding="utf-16")
    (tmp_path / "cut.gz").write_bytes(gzip.compress((SHORT_KV + "\n" + "z" * 99).encode() * 400)[:-30])
    # A log that was cut while its writer had it open begins with zeros.
    (tmp_path / "truncated.log").write_bytes(b"\0" * 100_000 + SHORT_KV.encode())
    for path in tmp_path.iterdir():
        assert read_log(pieces_of_file(str(path))).runs[0].findings[0].cause == "kv_too_small_for_max_len"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (bytes(range(256)) * 99, "binary"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x1f\x8bbroken", "cannot"),
        (b"\x28\xb5\x2f\xfdbroken", "cannot"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(content)
    with pytest.raises(LegroomError, match=words):
        list(pieces_of_file(str(path)))


def test_a_folder_and_a_missing_file_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(LegroomError, match="directory"):
        list(pieces_of_file(str(tmp_path)))
    with pytest.raises(LegroomError, match="no file"):
        list(pieces_of_file(str(tmp_path / "none.log")))


def wrapped(text: str, columns: int) -> str:
    return "\n".join(line[at : at + columns] for line in text.split("\n") for at in range(0, len(line) or 1, columns))


def whole(text: str) -> str:
    return b"".join(rejoin_lines([text.encode()])).decode()


@pytest.mark.parametrize("columns", [72, 80, 100, 120, 133])
def test_a_message_broken_at_any_width_is_made_whole(columns: int) -> None:
    assert [line for line in whole(wrapped(TRACE, columns)).split("\n") if line] == TRACE.split("\n")


def test_a_number_broken_in_the_middle_is_read() -> None:
    at = NOT_FREE.index("30.12") + 3
    finding = read_log([wrapped(NOT_FREE, at).encode()]).runs[0].findings[0]
    assert finding.evidence[0].facts["free_bytes"] == round(30.12 * 2**30)


def test_a_message_broken_between_words_is_made_whole() -> None:
    assert NOT_FREE in whole("\n".join(textwrap.wrap(NOT_FREE, 80, break_on_hyphens=False)))


def test_lines_broken_between_words_may_end_at_the_width() -> None:
    lines = [f"{'word ' * 15}wordy", " next words", f"{'word ' * 15}wordy", " then words", "a" * 60, "b" * 30]
    assert line_width("\n".join(lines)).at_words  # type: ignore[union-attr]


def test_the_name_of_an_error_can_be_broken() -> None:
    text = "(Worker_TP0 pid=60) ERROR 05-03 00:18:16 [multiproc_executor.py:870] torch.OutOfMemoryError: CUDA out of "
    text += "memory. Tried to allocate 1.19 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.10 GiB is free."
    assert "torch.OutOfMemoryError" in whole(wrapped(text, 80))


def test_a_line_broken_right_behind_its_prefix_goes_on_indented() -> None:
    prefix = "(VllmWorker rank=0 pid=12144) ERROR 04-30 16:21:27 [multiproc_executor.py:380]  "
    lines = [f"{prefix}  File 'a.py', line 677, in __call__", f"{prefix}    self.cuda_graph.capture_end()"]
    assert [line for line in whole(wrapped("\n".join(lines), 80)).split("\n") if line] == lines


def test_the_line_of_nccl_is_a_line_of_its_own() -> None:
    info = "INFO 07-08 13:05:36 model_runner.py:1] " + "words " * 20
    nccl = "host:116024:116024 [0] misc/strongstream.cc:53 NCCL WARN NCCL cannot be captured in a graph " + "words " * 9
    text = "\n".join(piece for line in (info, nccl) for piece in textwrap.wrap(line, 80))
    assert any(line.startswith("host:") for line in whole(text).split("\n"))


def test_evidence_keeps_the_line_number_of_the_text_as_given() -> None:
    text = wrapped(f"{TRACE}\n{NOT_FREE}", 80)
    first = wrapped(TRACE, 80).count("\n") + 2
    case = read_log([text.encode()]).runs[0].case
    check = case.first("free_below_desired")
    assert check is not None and check.line == first


def test_a_chain_that_goes_on_in_the_next_piece_is_not_lost() -> None:
    text = wrapped("\n".join([TRACE] * 3), 80).encode()
    pieces = [text[:400], *(text[at : at + 97] for at in range(400, len(text), 97))]
    joined = b"".join(rejoin_lines(pieces)).decode()
    assert [line for line in joined.split("\n") if line] == "\n".join([TRACE] * 3).split("\n")


def test_rows_of_a_table_are_not_joined() -> None:
    rows = "\n".join(
        f"root  {pid}  12.0  3.1  99999999  {rss}00000 ?  Sl  Jan02  1:00 " + "x" * 60
        for pid, rss in ((11, 10), (11, 20), (11, 30))
    )
    assert whole(rows) == rows


def test_lines_as_they_were_written_stay_as_they_are() -> None:
    assert line_width(TRACE) is None
    assert whole(TRACE) == TRACE


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=400))
def test_no_text_loses_lines(text: str) -> None:
    assert whole(text).count("\n") == text.count("\n")
