"""Five of each fault inside a real vLLM on an H200 (bench/memory_patterns_gpu.py), by what their server left behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legroom.black_box import parse_record
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import read_log
from legroom.fragments.fragment_report import fragment_report
from legroom.fragments.fragment_sources import read_source
from legroom.live.detectors import Watcher
from legroom.live.metrics.exposition import parse_sample

FIXTURE = Path(__file__).parents[1] / "fixtures/h200_faults.jsonl.gz"
ROWS: dict[str, dict[str, Any]] = {
    row["fault"]: row for row in map(json.loads, gzip.decompress(FIXTURE.read_bytes()).decode().splitlines()[1:])
}
CAUSES = {
    "burst": "runtime_activation_burst",
    "fragmentation": "allocator_fragmentation",
    "leak": "leak_over_time",
    "neighbour": "gpu_shared_or_not_free",
}
WATCHED = {
    "burst": "memory_burst",
    "fragmentation": "fragmentation",
    "leak": "memory_creep",
    "neighbour": "gpu_neighbour",
}
SECONDS = {"burst": 25.0, "neighbour": 25.0, "fragmentation": 3600.0, "leak": 3600.0}
"""What stands for a second of the recording: a look is one of every five seconds, and a leak takes hours."""


def test_there_are_five_of_each() -> None:
    assert sorted(row["kind"] for row in ROWS.values()) == sorted([*CAUSES] * 5)


@pytest.mark.parametrize("fault", ROWS)
def test_diagnose_names_it_by_its_black_box(fault: str) -> None:
    run = read_log([json.dumps(ROWS[fault]["record"]).encode()], "record", Hints()).runs[0]
    assert (run.verdict, run.findings[0].cause) == ("cause found", CAUSES[ROWS[fault]["kind"]])


@pytest.mark.parametrize("fault", ROWS)
def test_watch_names_it_by_the_servers_pages(fault: str) -> None:
    pages, watcher, kinds = ROWS[fault]["pages"], Watcher("http://127.0.0.1:8000"), set[str]()
    for page in pages:
        time_s = 1_790_000_000.0 + (page["time_s"] - pages[0]["time_s"]) * SECONDS[ROWS[fault]["kind"]]
        watcher.take(parse_sample(page["page"].encode(), time_s, "http://127.0.0.1:8000"))
        kinds |= {finding.kind for finding in watcher.findings}
    assert kinds & {*WATCHED.values()} == {WATCHED[ROWS[fault]["kind"]]}


@pytest.mark.parametrize("fault", [name for name, row in ROWS.items() if row["kind"] != "leak"])
def test_fragments_says_of_the_black_box_whether_a_setting_would_have_served_it(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "legroom-blackbox-1.json"
    path.write_text(json.dumps(ROWS[fault]["record"]))
    report = fragment_report(read_source(str(path))[0])
    assert report.would_expandable_segments_help is (ROWS[fault]["kind"] == "fragmentation")
    assert (report.part("others") is not None) is (ROWS[fault]["kind"] == "neighbour")


def test_every_record_has_the_step_of_the_second_model_runner() -> None:
    for row in ROWS.values():
        record = parse_record(json.dumps(row["record"]))
        assert record.step is not None and record.step.requests >= 1 and record.step.largest[0].scheduled_tokens >= 1
