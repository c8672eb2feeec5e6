"""Diagnoses of black boxes: made-up workers whose bytes leave one answer, and logs that name or neighbour a record."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from legroom.black_box import (
    AllocatorState,
    BlackBox,
    CardMemory,
    FailedRequest,
    MemoryReading,
    RecordedStep,
    ScheduledRequest,
    StackFrame,
    WorkerHostMemory,
    WorkerProcess,
)
from legroom.cli.main import main
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.units import GIB, MIB
from legroom.vllm_logs.log_sources import pieces_of_file

NOW_S = 1_800_000_000.0
FRAMES = (
    StackFrame("vllm/v1/engine/core.py", 1200, "run_busy_loop"),
    StackFrame("vllm/v1/worker/gpu_worker.py", 700, "execute_model"),
    StackFrame("vllm/v1/worker/gpu_model_runner.py", 4300, "execute_model"),
)
SETTINGS = {
    "model": "Qwen/Qwen3-0.6B",
    "max_model_len": 8256,
    "gpu_memory_utilization": 0.98,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "block_size": 16,
    "enforce_eager": True,
}


def readings(allocated: list[int], reserved: list[int], used: list[int]) -> tuple[MemoryReading, ...]:
    return tuple(
        MemoryReading(NOW_S - 5 * (len(allocated) - number), a, r, used_bytes=u)
        for number, (a, r, u) in enumerate(zip(allocated, reserved, used, strict=True))
    )


def record(
    wanted: int = 4 * GIB,
    free: int = GIB,
    allocated: int = 136 * GIB,
    reserved: int = 137 * GIB,
    largest: int = 100 * MIB,
    others: int | None = None,
    prompt_logprobs: int = 0,
    history: tuple[MemoryReading, ...] = (),
) -> BlackBox:
    return BlackBox(
        NOW_S,
        "out_of_memory",
        WorkerProcess(7, 0, "0.32.0", "2.11.0", "cuda"),
        FailedRequest(wanted, frames=FRAMES),
        CardMemory("0", "NVIDIA H200", 150_110_011_392, free, None if others is None else 84 * GIB, others),
        AllocatorState(allocated, reserved, largest_free_bytes=largest, private_free_bytes=0, private_pool_bytes=0),
        WorkerHostMemory(5 * GIB),
        RecordedStep(
            1, 8192, 1, (ScheduledRequest("r1", 8192, 0, 8192, None, 1 if prompt_logprobs else None),), prompt_logprobs
        ),
        dict(SETTINGS),
        history,
    )


STEADY = readings([136 * GIB] * 12, [137 * GIB] * 12, [137 * GIB + 600 * MIB] * 12)
BURST = record(history=STEADY, prompt_logprobs=1)
PIECES = record(2 * GIB, GIB // 2, 127 * GIB, 138 * GIB, 600 * MIB)
TAKEN = record(
    2 * GIB,
    300 * MIB,
    82 * GIB,
    83 * GIB,
    history=readings([82 * GIB] * 12, [83 * GIB] * 12, [83 * GIB + 600 * MIB] * 12),
)
NAMED_NEIGHBOUR = record(2 * GIB, 300 * MIB, 82 * GIB, 83 * GIB, others=55 * GIB)
LEAK = record(
    GIB,
    100 * MIB,
    138 * GIB,
    138 * GIB + 200 * MIB,
    history=readings(
        [(126 + n) * GIB for n in range(13)],
        [(127 + n) * GIB for n in range(13)],
        [(127 + n) * GIB + 600 * MIB for n in range(13)],
    ),
)


def diagnosed(box: BlackBox) -> LogReading:
    return read_log([json.dumps(box.to_json()).encode()], "box.json", Hints())


@pytest.mark.parametrize(
    ("box", "cause"),
    [
        (BURST, "runtime_activation_burst"),
        (PIECES, "allocator_fragmentation"),
        (TAKEN, "gpu_shared_or_not_free"),
        (NAMED_NEIGHBOUR, "gpu_shared_or_not_free"),
        (LEAK, "leak_over_time"),
    ],
)
def test_the_bytes_of_a_record_tell_what_ended_a_step(box: BlackBox, cause: str) -> None:
    run = diagnosed(box).runs[0]
    assert (run.verdict, run.phase, run.findings[0].cause) == ("cause found", "serving", cause)
    assert run.findings[0].confidence > 0.9


def test_the_finding_points_at_the_record_with_its_figures() -> None:
    evidence = diagnosed(PIECES).runs[0].findings[0].evidence[0]
    assert (evidence.id, evidence.line, evidence.facts["wanted_bytes"]) == ("black_box", 1, 2 * GIB)


def test_a_prompt_with_log_probabilities_gets_room_for_all_that_they_take() -> None:
    fix = diagnosed(BURST).runs[0].findings[0].fixes[0]
    # 8,192 tokens x 151,936 words x 10 bytes are 11.6 GiB, 9.6 more than was free and cached; a quarter beside it.
    assert fix.flags["gpu_memory_utilization"] == 0.89
    assert fix.plan is not None and fix.plan.verdict == "fits"


def test_pieces_are_joined_by_expandable_segments() -> None:
    fix = diagnosed(PIECES).runs[0].findings[0].fixes[0]
    assert "expandable_segments:True" in fix.env.values()


def test_a_leak_gets_the_time_until_the_next_restart() -> None:
    fix = diagnosed(LEAK).runs[0].findings[0].fixes[0]
    assert "12.00 GiB in 60 seconds" in fix.why and "720.00 GiB an hour" in fix.why


def test_growth_in_one_leap_is_no_leak() -> None:
    leap = readings([126 * GIB] * 6 + [138 * GIB] * 6, [138 * GIB] * 12, [139 * GIB] * 12)
    assert diagnosed(replace(LEAK, history=leap)).runs[0].findings[0].cause != "leak_over_time"


def test_a_record_that_was_asked_for_is_no_failure() -> None:
    asked = replace(BURST, trigger="asked", request=FailedRequest(frames=FRAMES))
    assert diagnosed(asked).runs[0].findings == ()


ENGINE = "(EngineCore pid=7) "
AT = f"{ENGINE}ERROR 11-16 07:10:00 [core.py:2]"
LOG = f"""\
{ENGINE}INFO 11-16 07:00:00 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='Qwen/Qwen3-0.6B'
{AT} EngineCore encountered a fatal error.
{AT}   File "/x/vllm/v1/worker/gpu_model_runner.py", line 4300, in execute_model
{AT} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def test_a_record_that_a_line_of_the_log_names_is_read(tmp_path: Path) -> None:
    box, log = tmp_path / "elsewhere" / "legroom-blackbox-1-7-1.json", tmp_path / "vllm.log"
    box.parent.mkdir()
    box.write_text(json.dumps(PIECES.to_json()))
    log.write_text(f"{LOG}(EngineCore pid=7) legroom black box written to {box}\n")
    first = read_log(pieces_of_file(str(log)), str(log), Hints()).runs[0].findings[0]
    assert (first.cause, first.evidence[0].id, first.evidence[0].line) == ("allocator_fragmentation", "black_box", 5)


def test_a_record_beside_the_log_is_read_where_it_is_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "legroom-blackbox-1-7-1.json").write_text(json.dumps(PIECES.to_json()))
    (tmp_path / "vllm.log").write_text(LOG)
    log = str(tmp_path / "vllm.log")
    assert read_log(pieces_of_file(log), log, Hints()).runs[0].findings[0].cause == "allocator_fragmentation"
    (tmp_path / "vllm.log").write_text(LOG.replace("pid=7", "pid=8"))
    assert read_log(pieces_of_file(log), log, Hints()).runs[0].case.black_box is None


def test_a_log_without_process_numbers_takes_a_record_of_its_last_minutes(tmp_path: Path) -> None:
    log, box = tmp_path / "vllm.log", tmp_path / "legroom-blackbox-1-7-1.json"
    log.write_text(LOG.replace("(EngineCore pid=7) ", ""))
    os.utime(log, (NOW_S + 60, NOW_S + 60))
    box.write_text(json.dumps(PIECES.to_json()))
    assert read_log(pieces_of_file(str(log)), str(log), Hints()).runs[0].case.black_box == PIECES
    os.utime(log, (NOW_S + 6000, NOW_S + 6000))
    assert read_log(pieces_of_file(str(log)), str(log), Hints()).runs[0].case.black_box is None


def test_a_record_that_a_full_disk_put_into_the_log_is_read() -> None:
    short = replace(PIECES, request=replace(PIECES.request, frames=FRAMES[-1:]), step=None, settings={}, history=())  # type: ignore[type-var]
    printed = json.dumps(_without_none(short.to_json()), separators=(",", ":"))
    assert len(printed) < 1900
    reading = read_log([f"{LOG}(EngineCore pid=7) legroom black box: {printed}\n".encode()], "the log", Hints())
    assert reading.runs[0].findings[0].cause == "allocator_fragmentation"
    assert reading.runs[0].case.black_box is not None


def _without_none(value):  # type: ignore[no-untyped-def]
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner not in (None, {}, (), [])}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def test_a_log_from_elsewhere_makes_no_file_of_this_machine_be_read(tmp_path: Path) -> None:
    box = tmp_path / "legroom-blackbox-1-7-1.json"
    box.write_text(json.dumps(PIECES.to_json()))
    log = f"{LOG}(EngineCore pid=7) legroom black box written to {box}\n"
    assert read_log([log.encode()], "the log", Hints(local_models=False)).runs[0].case.black_box is None


def test_a_record_that_is_gone_leaves_the_log_as_it_is() -> None:
    log = f"{LOG}(EngineCore pid=7) legroom black box written to /nowhere/legroom-blackbox-1-7-1.json\n"
    assert read_log([log.encode()], "the log", Hints()).runs[0].findings


def test_the_command_takes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = tmp_path / "legroom-blackbox-1-7-1.json"
    box.write_text(json.dumps(BURST.to_json()))
    assert main(["diagnose", str(box), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0]["cause"] == "runtime_activation_burst"
    assert answer["deployment"]["model"] == "Qwen/Qwen3-0.6B"


def test_a_damaged_record_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = tmp_path / "box.json"
    box.write_text(json.dumps(BURST.to_json())[:-50])
    assert main(["diagnose", str(box)]) == 2
    assert "not a whole black box" in capsys.readouterr().err


def test_a_neighbour_that_may_stay_gets_a_share_that_leaves_the_step_all_it_lacked() -> None:
    both = replace(NAMED_NEIGHBOUR, step=BURST.step, settings={**SETTINGS, "gpu_memory_utilization": 0.6})
    fix = next(fix for fix in diagnosed(both).runs[0].findings[0].fixes if fix.flags)
    # 11.6 GiB of log-probabilities less what is free and cached, and a quarter beside it: 13 GiB of 139.8.
    assert fix.flags == {"gpu_memory_utilization": 0.5}


def test_the_second_model_runner_takes_log_probabilities_in_pieces() -> None:
    frames = (*FRAMES[:2], StackFrame("vllm/v1/worker/gpu/model_runner.py", 2100, "sample_tokens"))
    of_v2 = replace(BURST, request=FailedRequest(4 * GIB, frames=frames))
    # 1,024 tokens at a time are 1.45 GiB; the request that failed lacked more.
    assert diagnosed(of_v2).runs[0].findings[0].fixes[0].flags["gpu_memory_utilization"] == 0.95


CAPTURE = (
    StackFrame("vllm/v1/worker/gpu_worker.py", 900, "compile_or_warm_up_model"),
    StackFrame("vllm/v1/worker/gpu/model_runner.py", 800, "capture_model"),
)
CAPTURED = replace(
    record(200 * MIB, 90 * MIB, 138 * GIB, 138 * GIB + 200 * MIB),
    step=None,
    request=FailedRequest(200 * MIB, frames=CAPTURE),
    settings={"model": "Qwen/Qwen3-0.6B", "max_model_len": 4096, "kv_cache_memory_bytes": 137 * GIB},
)


def test_free_pieces_are_not_why_a_graph_finds_no_room() -> None:
    run = diagnosed(CAPTURED).runs[0]
    assert (run.phase, run.findings[0].cause) == ("startup_graph", "cudagraph_capture_oom")


def test_a_pool_that_is_given_in_bytes_is_made_smaller_in_bytes() -> None:
    fix = diagnosed(CAPTURED).runs[0].findings[0].fixes[0]
    assert set(fix.flags) == {"kv_cache_memory_bytes"} and fix.flags["kv_cache_memory_bytes"] < 136.5 * GIB
    assert fix.plan is not None and fix.plan.starts
