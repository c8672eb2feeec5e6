"""Every decision of a real vLLM scheduler, replayed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legroom.simulation.fast.fast_replay import FastReplay, can_replay
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.timeline import ScheduledStep
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate
from legroom.simulation.traces import jsonl

_RECORDINGS = Path(__file__).parent / "recordings" / "vllm-0.32.0.jsonl.gz"


def _recordings() -> list[dict[str, Any]]:
    with gzip.open(_RECORDINGS, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _load(recording: dict[str, Any]) -> tuple[Trace, SchedulerSettings]:
    options = dict(recording["settings"])
    options["groups"] = tuple(LayerGroup(window) for window in options.pop("windows", [None]))
    rows = (json.dumps(row) for row in recording["requests"])
    return jsonl.read(rows, "recorded").checked(), SchedulerSettings(**options)


_ALL = _recordings()
_JUMPED = [number for number, recording in enumerate(_ALL) if can_replay(_load(recording)[1])]
"""Those whose rules the fast replay knows; the others it leaves to the reference."""


@pytest.mark.parametrize("number", range(len(_ALL)))
def test_every_step_is_the_one_that_vllm_took(number: int) -> None:
    recording = _ALL[number]
    trace, settings = _load(recording)
    steps: list[ScheduledStep] = []

    simulate(trace, settings, steps.append)

    ours = [
        [s.step, s.scheduled, sorted(s.preempted), sorted(s.finished), s.running, s.waiting, s.free_blocks]
        for s in steps
    ]
    assert ours == recording["steps"]


def test_most_recordings_can_be_jumped_through() -> None:
    assert len(_JUMPED) > len(_ALL) // 2


@pytest.mark.parametrize("number", _JUMPED)
def test_jumping_gives_every_request_the_life_it_had_in_vllm(number: int) -> None:
    recording = _ALL[number]
    trace, settings = _load(recording)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, scheduled, _, finished, *_ in recording["steps"]:
        for name in scheduled:
            first.setdefault(name, step)
        last.update(dict.fromkeys(finished, step))

    timeline = FastReplay(trace, settings).run()

    ids = [trace.id_of(i) for i in range(len(trace))]
    assert dict(zip(ids, timeline.first_sched_steps, strict=True)) == first
    finished = dict(zip(ids, timeline.finish_steps, strict=True))
    # Asynchronous scheduling may end requests in a step without a token, and a recording has no such step.
    recorded = {step[0] for step in recording["steps"]}
    assert {name: step for name, step in finished.items() if step in recorded} == last
    assert all(step - 1 in recorded for step in finished.values() if step not in recorded)
    assert dict(zip(ids, timeline.preemption_counts, strict=True)) == {
        name: recording["preempted"].get(name, 0) for name in ids
    }
