"""The planner of 53 releases: blocks, printed tokens and concurrency, fitted lengths and error texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kv_cases import GIB, settings

from legroom.facts.releases import Release, release
from legroom.memory.kv.kv_plan import KvPlan, plan_of_shape
from legroom.memory.kv.shape import shape_of_specs
from legroom.memory.kv.specs import CacheSpec, FullAttentionSpec, LatentSpec, SlidingWindowSpec, StateSpec

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "planner_releases.json").read_text("utf-8"))
Stages = list[dict[str, CacheSpec]]


@dataclass(frozen=True)
class Question:
    stages: Stages
    available_bytes: tuple[int, ...] = (10 * GIB,)
    block_size: int = 16
    hybrid_off: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


def heads(block_size: int, kv_heads: int, head_dim: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, kv_heads, head_dim, head_dim, 4 * kv_heads * head_dim)


def window(tokens: int, kv_heads: int, head_dim: int, in_flight_tokens: int) -> SlidingWindowSpec:
    width = 4 * kv_heads * head_dim
    return SlidingWindowSpec(16, kv_heads, head_dim, head_dim, width, window=tokens, in_flight_tokens=in_flight_tokens)


def dense(first: int, last: int) -> dict[str, CacheSpec]:
    return {str(index): heads(16, 8, 128) for index in range(first, last)}


def one_in_six(first: int, last: int, in_flight_tokens: int) -> dict[str, CacheSpec]:
    """Gemma-3-1B: five windows of 512, then a full layer."""
    local = window(512, 1, 256, in_flight_tokens)
    return {str(index): heads(16, 1, 256) if (index + 1) % 6 == 0 else local for index in range(first, last)}


def with_drafts(pattern: str, drafts: int) -> dict[str, CacheSpec]:
    kinds: dict[str, CacheSpec] = {"w": window(128, 8, 64, 8192), "f": heads(16, 8, 64)}
    layers = {str(index): kinds[letter] for index, letter in enumerate(pattern)}
    return layers | {f"draft {index}": kinds["f"] for index in range(drafts)}


def states(now: Release, aligned: bool) -> dict[str, CacheSpec]:
    """28 recurrent layers and 4 full ones in 528-token blocks."""
    held, per_length = (2 if aligned else 1), False
    if now.before("0.11.1"):
        held = 1
    elif now.before("0.15.0"):
        held, per_length = 0, True
    state = StateSpec(528 if aligned else 1 << 40, 1_081_344, held, per_length)
    return {str(index): heads(528, 2, 256) if index % 8 == 7 else state for index in range(32)}


def question(name: str, now: Release) -> Question:
    batches = 2 if now.at_least("0.26.0") else 1
    latent: CacheSpec = LatentSpec(64, 1, 576, 0, 1152) if now.at_least("0.8.0") else heads(64, 1, 576)
    fitted = {"max_model_len": 131_072, "auto_fit_len": now.at_least("0.14.0")}
    return {
        "uniform": lambda: Question([dense(0, 32)]),
        "too long": lambda: Question([dense(0, 32)], (5 * GIB,), changes={"max_model_len": 131_072}),
        "override": lambda: Question([dense(0, 32)], changes={"num_gpu_blocks_override": 1000}),
        "small override": lambda: Question([dense(0, 32)], changes={"num_gpu_blocks_override": 100}),
        "exact fit": lambda: Question([dense(0, 32)], (GIB,)),
        "latent": lambda: Question(
            [{str(i): latent for i in range(61)}], (20 * GIB,), 64, changes={"max_model_len": 163_840}
        ),
        "hybrid": lambda: Question([one_in_six(0, 26, 8192)], (4 * GIB,), changes={"max_model_len": 32_768}),
        "hybrid, small batch": lambda: Question(
            [one_in_six(0, 26, 2048)], (4 * GIB,), changes={"max_model_len": 32_768}
        ),
        "hybrid manager off": lambda: Question(
            [one_in_six(0, 26, 8192)], (4 * GIB,), hybrid_off=True, changes={"max_model_len": 32_768}
        ),
        "hybrid, two batches in flight": lambda: Question(
            [one_in_six(0, 26, 2048 * batches)], (4 * GIB,), changes={"max_model_len": 32_768}
        ),
        "hybrid with a draft layer": lambda: Question(
            [with_drafts("wf" * 12, 1)], (8 * GIB,), changes={"max_model_len": 131_072}
        ),
        "hybrid with two draft layers": lambda: Question(
            [with_drafts("fwww" * 6, 2)], (8 * GIB,), changes={"max_model_len": 131_072}
        ),
        "hybrid on two stages": lambda: Question(
            [one_in_six(0, 13, 2048), one_in_six(13, 26, 2048)], (4 * GIB, 3 * GIB), changes={"max_model_len": 32_768}
        ),
        "states, no prefix cache": lambda: Question([states(now, False)], (4 * GIB,), 528),
        "states, aligned": lambda: Question([states(now, True)], (4 * GIB,), 528),
        "fitted length": lambda: Question([dense(0, 32)], (5 * GIB,), changes=fitted),
        "uneven stages": lambda: Question([dense(0, 20), dense(20, 32)], (10 * GIB, 10 * GIB)),
    }[name]()


def planned(version: str, name: str) -> KvPlan:
    now = release(version)
    asked = question(name, now)
    shape = shape_of_specs(asked.stages, now, asked.block_size, hybrid_off=asked.hybrid_off)
    return plan_of_shape(shape, settings(version, **asked.changes), asked.available_bytes)


def answer_of(plan: KvPlan, keys: Iterable[str]) -> dict[str, Any]:
    said = {
        "error": plan.failure and plan.failure.message,
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "tokens": plan.tokens,
        "concurrency": f"{plan.max_concurrency:.2f}" if plan.failure is None else None,
    }
    return {key: said[key] for key in {"error", *keys}}


@pytest.mark.parametrize("version", FIXTURE["answers"])
def test_every_plan_is_what_that_release_answers(version: str) -> None:
    for name, recorded in FIXTURE["answers"][version].items():
        error = FIXTURE["messages"][recorded["error"]] if "error" in recorded else None
        assert answer_of(planned(version, name), recorded) == {**recorded, "error": error}, name
