"""What holds for every detector: the registry, the catalog behind it, and no input that makes one fail."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import legroom.live.detectors as room
from legroom.diagnosis.causes import causes
from legroom.explain.catalog_entries import bundled
from legroom.live.detectors import DETECTORS, Watcher
from legroom.live.forecast import pool_forecast
from legroom.live.metrics.sample import EngineSample, Histogram, Sample, ScrapeFailure
from legroom.live.remedies import remedies_for
from legroom.planning.plan_document import PlanDocument, PlannedGpu, PlannedKv

HERE = Path(__file__).parent


def test_every_file_is_listed_and_every_detector_has_its_test_beside_it() -> None:
    files = {file.stem for file in Path(room.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert {kind.kind for kind in DETECTORS} == files
    assert all((HERE / f"test_{name}.py").exists() for name in files)


def test_causes_and_entries_are_those_of_the_catalog() -> None:
    entries = {entry.id for entry in bundled()}
    labels = {cause.label for cause in causes()}
    for kind in DETECTORS:
        assert kind.entry == "" or kind.entry in entries, kind.kind
        assert kind.cause == "" or kind.cause in labels, kind.kind
        assert kind.title


def test_a_restart_is_said_to_help_only_where_it_can() -> None:
    helped = {kind.kind for kind in DETECTORS if kind.restart_helps}
    assert helped == {"stuck_engine", "unreachable", "memory_creep", "host_memory_creep", "fragmentation"}


NUMBER = st.none() | st.floats(0, 1e6) | st.just(0.0)
ENGINE = st.builds(
    EngineSample,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "0", "1"]),
    kv_use=st.none() | st.floats(0, 1),
    running=NUMBER,
    waiting=NUMBER,
    preemptions=NUMBER,
    prefix_queries=NUMBER,
    prefix_hits=NUMBER,
    prompt_tokens=NUMBER,
    generation_tokens=NUMBER,
    finished=NUMBER,
    num_blocks=st.none() | st.integers(1, 10**6),
    block_size=st.none() | st.just(16),
    ttft=st.none() | st.integers(0, 100).map(lambda n: Histogram((1.0, float("inf")), (n, n), float(n))),
)
TIME = st.floats(0, 1e5)
LOOK = st.builds(
    Sample,
    TIME,
    st.just("s"),
    st.lists(ENGINE, max_size=3, unique_by=lambda engine: engine.key).map(tuple),
    memory_used_bytes=st.none() | st.integers(0, 10**12),
    reserved_bytes=st.none() | st.integers(0, 10**12),
    host_rss_bytes=st.none() | st.integers(0, 10**12),
    allocated_bytes=st.none() | st.integers(0, 10**12),
    others_bytes=st.none() | st.integers(0, 10**12),
    alloc_retries=st.none() | st.integers(0, 100),
) | st.builds(ScrapeFailure, TIME, st.just("s"), st.sampled_from(["refused", "timeout", "auth"]), st.just("no"))
PLAN = PlanDocument(kv=PlannedKv(num_blocks=100, block_size=16), gpu=PlannedGpu(total_bytes=10**10, count=1))


@given(st.lists(LOOK, max_size=30))
def test_no_looks_make_a_detector_fail_or_speak_without_numbers(looks) -> None:  # type: ignore[no-untyped-def]
    watcher = Watcher("s", plan=PLAN)
    for look in looks:
        for finding in watcher.take(look):
            assert finding.reason and finding.since_s <= finding.time_s
            assert all(math.isfinite(value) for value in finding.numbers.values())
            assert remedies_for(finding, watcher.window)
        pool_forecast(watcher.window)
