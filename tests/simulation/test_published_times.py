"""Seconds against measurements that others published: `bench/published_times.py` on the quickest of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from legroom.simulation.from_plan import hardware
from legroom.simulation.step_time import why_untrusted

_BENCH = Path(__file__).parents[2] / "bench" / "published_times.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_times", _BENCH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["published_times"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _runs(bench: ModuleType, gpu: str, *words: str) -> list[dict[str, Any]]:
    runs = json.loads(bench.RUNS.read_text("utf-8"))["runs"]
    return [run for run in runs if run["gpu"] == gpu and all(word in run["command"] for word in words)]


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_a_split_server_that_others_measured_takes_what_is_predicted(bench: ModuleType, gpu: str) -> None:
    (run,) = _runs(bench, gpu, "llama-3.1-70b", "--tensor-parallel-size 4")
    few = {**run, "rows": run["rows"][:2]}
    for row in bench.predictions(bench.planned(run), few):
        assert row["in_band"]
        assert abs(row["end_to_end_error"]) < 0.15


def test_models_with_experts_that_were_not_measured_get_no_number(bench: ModuleType) -> None:
    plan = bench.planned(_runs(bench, "h200", "gpt-oss-120b")[0])
    assert why_untrusted(plan, hardware(plan))


def test_every_published_run_names_a_source(bench: ModuleType) -> None:
    document = json.loads(bench.RUNS.read_text("utf-8"))
    assert {run["source"] for run in document["runs"]} <= set(document["sources"])
