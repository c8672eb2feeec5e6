from __future__ import annotations

from typing import Any

from fake_server import FakeServer

from legroom.live.detectors.plan_drift import PlanDrift


def plan(blocks: int, low: int = 98, high: int = 102) -> dict[str, Any]:
    return {
        "kv": {"num_blocks": blocks, "block_size": 16, "max_concurrency": 9.0},
        "layout": {"kv_cache_bytes": 100},
        "confidence": {"kv_cache_bytes": {"low": low, "high": high}},
    }


def test_a_smaller_pool_than_planned_is_said_with_both_numbers() -> None:
    findings = FakeServer(PlanDrift, plan(1200)).scrapes(2, max_concurrency=7.5)
    assert findings[1] is not None
    assert all(fact in findings[1].reason for fact in ("16,000 tokens", "19,200 (-17%)", "7.5 full-length"))


def test_a_larger_pool_is_information() -> None:
    finding = FakeServer(PlanDrift, plan(800)).scrapes(2)[1]
    assert finding is not None and finding.severity == "info"


def test_a_pool_within_the_plans_own_band_is_as_planned() -> None:
    assert FakeServer(PlanDrift, plan(1150, low=80)).scrapes(5) == [None] * 5
    assert FakeServer(PlanDrift, plan(1020)).scrapes(5) == [None] * 5


def test_without_a_plan_nothing_can_drift() -> None:
    assert FakeServer(PlanDrift).scrapes(5) == [None] * 5
    assert FakeServer(PlanDrift, {"kv": {}}).scrapes(5) == [None] * 5


def test_a_pool_that_several_groups_of_layers_share_is_compared_by_its_blocks() -> None:
    assert FakeServer(PlanDrift, plan(1000)).scrapes(5, size_tokens=8000) == [None] * 5
