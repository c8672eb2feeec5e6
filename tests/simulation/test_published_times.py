"""Seconds against measurements that others published, on the quickest of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from closed_loop import PUBLISHED, plan_of_run, predictions

from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import step_band, why_no_step_time

DOCUMENT = json.loads(PUBLISHED.read_text("utf-8"))


def _runs(gpu: str, *words: str) -> list[dict[str, Any]]:
    return [run for run in DOCUMENT["runs"] if run["gpu"] == gpu and all(word in run["command"] for word in words)]


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_a_split_server_that_others_measured_takes_what_is_predicted(gpu: str) -> None:
    (run,) = _runs(gpu, "llama-3.1-70b", "--tensor-parallel-size 4")
    few = {**run, "rows": run["rows"][:2]}
    for row in predictions(plan_of_run(run), few):
        assert row["in_band"]
        assert abs(row["end_to_end_error"]) < 0.15


def test_models_with_experts_get_a_number_with_a_range() -> None:
    (run, *_) = _runs("h200", "gpt-oss-120b")
    plan = plan_of_run(run)
    assert not why_no_step_time(hardware(plan))
    for row in predictions(plan, {**run, "rows": run["rows"][:2]}):
        assert row["in_band"]
        assert abs(row["end_to_end_error"]) < 0.25


def test_a_decode_that_waits_for_the_host_says_so() -> None:
    bands = {}
    for name in ("llama-3.2-1b", "llama-3.1-8b", "deepseek-v2-lite"):
        plan = plan_of_run({"vllm": "0.32.0", "gpu": "h200", "command": f"vllm serve {name}"})
        bands[name] = step_band(plan, hardware(plan))
    assert any("the host takes longer" in why for why in bands["llama-3.2-1b"].why_wide)
    assert bands["llama-3.1-8b"].why_wide == ()
    assert all(band.low <= 1 <= band.high for band in bands.values())


def test_what_nobody_ran_has_a_wider_range_that_says_why() -> None:
    (run, *_) = _runs("h200", "gpt-oss-120b")
    known = plan_of_run({**run, "command": f"{run['command']} --tensor-parallel-size 2"})
    unknown = plan_of_run({**run, "gpu": "gh200"})
    narrow, wide = (step_band(plan, hardware(plan)) for plan in (known, unknown))
    assert wide.low < narrow.low and narrow.high < wide.high
    assert any("on this card" in why for why in wide.why_wide)


def test_every_published_run_names_a_source() -> None:
    assert {run["source"] for run in DOCUMENT["runs"]} <= set(DOCUMENT["sources"])
