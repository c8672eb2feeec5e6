"""`vllm serve` driven out of memory on an H200, and started again with the fix (bench/black_box_gpu.py)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import Diagnosis, read_log

FIXTURE = Path(__file__).parents[1] / "fixtures/h200_served.jsonl.gz"
ROWS: dict[str, dict[str, Any]] = {
    row["case"]: row for row in map(json.loads, gzip.decompress(FIXTURE.read_bytes()).decode().splitlines()[1:])
}
CAUSES = {
    "prompt_logprobs": "runtime_activation_burst",
    "prompt_logprobs_v2": "runtime_activation_burst",
    "sampling": "runtime_activation_burst",
    "fragmentation": "allocator_fragmentation",
    "leak": "leak_over_time",
    "neighbour": "gpu_shared_or_not_free",
    "pool": "no_cache_blocks",
    "graphs": "cudagraph_capture_oom",
}


def diagnosed(case: str) -> Diagnosis:
    return read_log([json.dumps(ROWS[case]["record"]).encode()], "record", Hints()).runs[0]


def share(case: str) -> float:
    words = ROWS[case]["command"]
    return float(words[words.index("--gpu-memory-utilization") + 1])


@pytest.mark.parametrize(("case", "cause"), CAUSES.items())
def test_each_way_out_of_memory_is_named(case: str, cause: str) -> None:
    assert ROWS[case]["outcome"] != "survived"
    assert diagnosed(case).findings[0].cause == cause


@pytest.mark.parametrize("case", ["prompt_logprobs", "prompt_logprobs_v2", "sampling", "neighbour"])
def test_the_share_that_is_computed_leaves_at_least_what_survived_the_same_load(case: str) -> None:
    assert ROWS[f"{case}_fixed"]["outcome"] == "survived"
    fix = next(fix for fix in diagnosed(case).findings[0].fixes if fix.flags)
    assert fix.flags["gpu_memory_utilization"] <= share(f"{case}_fixed") < share(case)


def test_expandable_segments_are_what_the_fragmented_server_survived_with() -> None:
    assert ROWS["fragmentation_fixed"]["outcome"] == "survived"
    fix = diagnosed("fragmentation").findings[0].fixes[0]
    assert fix.env.items() <= ROWS["fragmentation_fixed"]["env"].items() and fix.env


def test_a_leak_lasts_as_long_again_after_the_restart_that_is_asked_for() -> None:
    assert ROWS["leak_fixed"]["outcome"] == "survived"
    assert "restart" in diagnosed("leak").findings[0].fixes[0].steps[0]


@pytest.mark.parametrize("case", ["pool", "graphs"])
def test_a_pool_in_bytes_that_is_too_large_is_made_as_small_as_the_one_that_started(case: str) -> None:
    assert (ROWS[case]["outcome"], ROWS[f"{case}_fixed"]["outcome"]) == ("did not start", "survived")
    words = ROWS[f"{case}_fixed"]["command"]
    started = int(words[words.index("--kv-cache-memory-bytes") + 1])
    assert diagnosed(case).findings[0].fixes[0].flags["kv_cache_memory_bytes"] <= started


def test_plans_made_before_the_starts_are_within_a_thousandth_of_their_pools() -> None:
    started = [row for row in ROWS.values() if row["blocks"]]
    assert len(started) >= 14
    assert all(abs(row["planned_blocks"] / row["blocks"] - 1) <= 0.001 for row in started)
