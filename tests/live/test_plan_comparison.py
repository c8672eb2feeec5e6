"""A plan beside what its server shows."""

from __future__ import annotations

from legroom.live.detectors.plan_drift import ComparedFigure, compare_with_plan
from legroom.live.metrics.sample import EngineSample, Sample
from legroom.planning.plan_document import PlanDocument, PlannedBand, PlannedGpu, PlannedKv, PlannedLayout


def planned(blocks: int = 1000) -> PlanDocument:
    return PlanDocument(
        gpu=PlannedGpu("a GPU", 2, 100),
        layout=PlannedLayout(kv_cache_bytes=100, peak_used_bytes=90),
        kv=PlannedKv(block_size=16, num_blocks=blocks, max_concurrency=4.0),
        confidence={
            "kv_cache_bytes": PlannedBand("estimated", 80, 104),
            "peak_used_bytes": PlannedBand("estimated", 85, 95),
        },
    )


def seen(*blocks: int, used_bytes: int | None = None) -> Sample:
    engines = tuple(
        EngineSample("m", str(index), num_blocks=count, block_size=16) for index, count in enumerate(blocks)
    )
    return Sample(0.0, "http://a:8000", engines, memory_used_bytes=used_bytes)


def figure(name: str, sample: Sample) -> ComparedFigure:
    return next(row for row in compare_with_plan(planned(), sample) if row.name == name)


def test_a_pool_within_the_plans_band_is_as_planned() -> None:
    assert figure("num_blocks", seen(810)).is_as_planned is True


def test_a_pool_below_the_plans_band_is_not_as_planned() -> None:
    assert figure("pool_tokens", seen(790)).is_as_planned is False


def test_a_band_narrower_than_the_tolerance_of_drift_is_widened_to_it() -> None:
    assert figure("num_blocks", seen(1045)).is_as_planned is True


def test_of_several_engines_the_one_furthest_off_counts() -> None:
    assert figure("num_blocks", seen(1000, 500)).actual == 500


def test_what_a_server_does_not_show_is_left_open() -> None:
    assert figure("max_concurrency", seen(1000)).is_as_planned is None


def test_the_memory_of_all_gpus_may_reach_the_top_of_the_planned_peak() -> None:
    assert figure("memory_used_bytes", seen(1000, used_bytes=190)).is_as_planned is True
    assert figure("memory_used_bytes", seen(1000, used_bytes=191)).is_as_planned is False


def test_a_plan_without_a_pool_compares_nothing() -> None:
    assert compare_with_plan(planned(blocks=0), seen(1000)) == ()
