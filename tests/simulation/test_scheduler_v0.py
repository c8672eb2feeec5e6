"""The rules of the V0 engine. Expected values follow vLLM 0.6.3's scheduler, driven on such workloads."""

from __future__ import annotations

from typing import Any

import pytest

from legroom.errors import LegroomError
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.timeline import ScheduledStep, Timeline
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate


def _settings(num_blocks: int, **changes: Any) -> SchedulerSettings:
    flags = {"max_num_seqs": 8, "max_num_batched_tokens": 200, "max_model_len": 200, "watermark": 0.01}
    return SchedulerSettings(
        num_blocks, engine="V0", enable_prefix_caching=False, enable_chunked_prefill=False, **{**flags, **changes}
    )


def _replay(settings: SchedulerSettings, *rows: tuple[int, int, int]) -> tuple[Timeline, list[ScheduledStep]]:
    trace, steps = Trace(), list[ScheduledStep]()
    for arrival, prompt_len, output_len in rows:
        trace.add(prompt_len, output_len, arrival)
    return simulate(trace, settings, steps.append), steps


def test_everything_finishes_in_a_tight_pool() -> None:
    timeline, _ = _replay(_settings(12), *[(0, 30, 40)] * 8)
    assert timeline.tally.finished == 8
    assert timeline.tally.preemptions > 0
    assert timeline.tally.recomputed_tokens > 0


def test_a_prompt_stops_all_decodes_for_a_step() -> None:
    _, steps = _replay(_settings(100), (0, 30, 5), (2, 40, 5))
    assert [step.scheduled for step in steps[:4]] == [{"r0": 30}, {"r0": 1}, {"r1": 40}, {"r0": 1, "r1": 1}]


def test_prompts_that_exceed_the_budget_together_start_one_after_the_other() -> None:
    _, steps = _replay(_settings(100), (0, 150, 2), (0, 100, 2))
    assert [step.scheduled for step in steps[:2]] == [{"r0": 150}, {"r1": 100}]


def test_there_is_no_null_block() -> None:
    timeline, steps = _replay(_settings(4, watermark=0.0), (0, 64, 1))
    assert timeline.tally.finished == 1
    assert steps[0].free_blocks == 4


def test_the_watermark_keeps_a_prompt_waiting() -> None:
    # 100 blocks of 16; the first prompt holds 93, the second wants 7: none would stay free.
    rows = ((0, 93 * 16 - 1, 20), (0, 7 * 16, 20))
    flags = {"max_num_batched_tokens": 4000, "max_model_len": 4000}
    _, steps = _replay(_settings(100, **flags), *rows)
    assert list(steps[0].scheduled) == ["r0"]
    _, steps = _replay(_settings(100, **flags, watermark=0.0), *rows)
    assert list(steps[0].scheduled) == ["r0", "r1"]


def test_the_last_request_is_preempted_and_comes_back_first() -> None:
    _, steps = _replay(_settings(4, watermark=0.0), (0, 16, 30), (0, 16, 30), (0, 16, 30))
    assert [step.preempted for step in steps[1:3]] == [["r2"], ["r1"]]
    assert steps[3].scheduled == {"r1": 18}


def test_a_decode_wants_a_free_block_even_if_its_last_one_has_room() -> None:
    # Two prompts of 17 tokens fill the pool of 4 blocks; nobody needs a fifth, yet the second is thrown out.
    _, steps = _replay(_settings(4, watermark=0.0), (0, 17, 4), (0, 17, 4))
    assert steps[1].preempted == ["r1"]


def test_a_prompt_larger_than_the_pool_is_ignored_and_the_next_one_starts() -> None:
    timeline, steps = _replay(_settings(5), (0, 100, 4), (0, 16, 4))
    assert [rejection.id for rejection in timeline.rejections] == ["r0"]
    assert steps[0].scheduled == {"r1": 16}


def test_a_request_that_outgrows_the_pool_is_ignored_then() -> None:
    timeline, steps = _replay(_settings(4, watermark=0.0), (0, 30, 100))
    assert timeline.tally.finished == 0
    assert "the pool has 4" in timeline.rejections[0].why
    assert len(steps) > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": True},
        {"scheduling_policy": "priority"},
        {"num_speculative_tokens": 2},
        {"groups": (LayerGroup(), LayerGroup(128))},
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any]) -> None:
    flags = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 9000}
    with pytest.raises(LegroomError, match="V0 engine is not simulated"):
        SchedulerSettings(100, engine="V0", **{**flags, **changes})
