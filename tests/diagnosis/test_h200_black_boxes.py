"""Black boxes that a real vLLM wrote on an H200 (bench/black_box_gpu.py), and the load under which a fix was tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legroom.black_box import BlackBox, parse_record
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.live.detectors import Watcher
from legroom.live.metrics.sample import EngineSample, Sample

FIXTURE = Path(__file__).parents[1] / "fixtures/h200_black_boxes.jsonl"
ROWS: dict[str, dict[str, Any]] = {
    row["case"]: row for row in map(json.loads, FIXTURE.read_text("utf-8").splitlines()[1:])
}
CAUSES = {"burst": "runtime_activation_burst", "leak": "leak_over_time", "neighbour": "gpu_shared_or_not_free"}
WATCHED = {"burst": set(), "leak": {"memory_creep"}, "neighbour": set()}
READING_S = 900.0
"""What stands for the 0.4 seconds between two readings: a detector wants hours."""


def record(case: str) -> BlackBox:
    return parse_record(json.dumps(ROWS[case]["record"]))


@pytest.mark.parametrize(("case", "cause"), CAUSES.items())
def test_each_way_out_of_memory_is_named(case: str, cause: str) -> None:
    assert ROWS[case]["outcome"] == "OutOfMemoryError"
    run = read_log([json.dumps(ROWS[case]["record"]).encode()], "record", Hints()).runs[0]
    assert (run.verdict, run.phase, run.findings[0].cause) == ("cause found", "serving", cause)


def test_the_fix_that_is_computed_leaves_the_room_with_which_the_same_load_survived() -> None:
    run = read_log([json.dumps(ROWS["burst"]["record"]).encode()], "record", Hints()).runs[0]
    share = run.findings[0].fixes[0].flags["gpu_memory_utilization"]
    # 0.88 survived; so did 0.9, with 0.7 GiB of other memory beside it (the case meant to fragment, which did not).
    survived = {row["gpu_memory_utilization"] for row in ROWS.values() if row["outcome"] == "survived"}
    assert survived == {0.88, 0.9} and share <= max(survived)


def test_a_server_that_serves_and_was_asked_for_a_record_has_no_problem() -> None:
    asked = ROWS["burst_fixed"]["record"]
    assert asked["trigger"] == "asked"
    assert read_log([json.dumps(asked).encode()], "record", Hints()).runs[0].findings == ()


@pytest.mark.parametrize("case", CAUSES)
def test_the_step_and_the_place_are_in_the_record(case: str) -> None:
    box = record(case)
    assert box.request is not None and box.request.wanted_bytes and box.step is not None and box.step.requests == 1
    assert any(frame.function in ("execute_model", "sample_tokens") for frame in box.request.frames)
    assert box.card is not None and box.card.name == "NVIDIA H200"
    assert box.allocator is not None and box.allocator.segments


@pytest.mark.parametrize(("case", "kinds"), WATCHED.items())
def test_the_detectors_see_what_lasts_in_the_readings_before_it(case: str, kinds: set[str]) -> None:
    watcher, box = Watcher("s"), record(case)
    readings = [reading for reading in box.history if (reading.reserved_bytes or 0) > 70 * 2**30]
    seen: set[str] = set()
    for number, reading in enumerate(readings):
        engine = EngineSample("m", "0", running=1, finished=float(number))
        sample = Sample(
            1_700_000_000.0 + READING_S * number,
            "s",
            (engine,),
            memory_used_bytes=reading.used_bytes,
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
        )
        seen |= {finding.kind for finding in watcher.take(sample)}
    assert seen & {"memory_creep", "host_memory_creep", "fragmentation"} == kinds
