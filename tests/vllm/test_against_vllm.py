"""Resolved settings against what vLLM 0.32.0 itself resolves (recorded; the file says how)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from legroom.facts.gpus import Gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.units import GIB
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve
from legroom.vllm.setting_checks import RefusedByVllm

CASES = json.loads((Path(__file__).parent / "data" / "settings_0_32.json").read_text())["cases"]


LOWERED_BY_BACKEND = ("llama-4", "gemma-3-27b", "gemma-3-4b-fp8")


def settle(case: dict[str, Any]) -> EngineSettings:
    gpu = Gpu(case["gpu"], int(case["total_gib"] * GIB), compute_capability=tuple(case["compute_capability"]))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in case["args"].items()}
    args = ServeArgs(model=case["model"], usage=case["usage"], env=case["env"], **given)
    return resolve(args, load(case["model"], offline=True), gpu, release("0.32.0"))


def name_of(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['gpu']}-{case['usage']}-{json.dumps(case['args'] | case['env'])}"


@pytest.mark.parametrize("case", [case for case in CASES if "vllm" in case], ids=name_of)
def test_settings_are_those_vllm_resolves(case: dict[str, Any]) -> None:
    found = settle(case)
    sizes = found.cudagraph_capture_sizes
    ours = {name: getattr(found, name) for name in case["vllm"] if name != "capture"}
    ours["capture"] = [len(sizes), max(sizes, default=0), sum(sizes)]
    recorded = dict(case["vllm"])
    if case["model"].startswith(LOWERED_BY_BACKEND) and recorded["cudagraph_mode"] == "FULL_AND_PIECEWISE":
        # The record ends before the model runner asks the attention backend, which has no full graphs here.
        recorded["cudagraph_mode"] = "PIECEWISE"
    assert ours == recorded


@pytest.mark.parametrize("case", [case for case in CASES if "refused" in case], ids=name_of)
def test_settings_vllm_refuses_are_refused_in_its_words(case: dict[str, Any]) -> None:
    with pytest.raises(RefusedByVllm) as caught:
        settle(case)
    assert case["refused"].replace(".0 or", " or") in caught.value.vllm_message
