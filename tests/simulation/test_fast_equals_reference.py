from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation_workloads import workloads

from legroom.simulation.fast.accounting import decode_steps_seconds, step_seconds
from legroom.simulation.fast.fast_replay import FastReplay
from legroom.simulation.fast.jit import is_compiled_before, numba_is_installed
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.timeline import Timeline
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import StepByStepReplay

COST = StepCost(0.4, 0.01, 0.3, 0.002, 0.2, 0.9, 0.0003, 0.001, 0.8, 0.002, 1.4, 1.1, 32.0, 0.004, 6.5, 0.003, 0.9)


def _same(fast: Timeline, other: Timeline) -> None:
    assert fast.tally == other.tally
    for name in ("first_sched_steps", "first_token_steps", "finish_steps", "preemption_counts"):
        assert list(getattr(fast, name)) == list(getattr(other, name)), name
    assert fast.wait_steps("latency") == other.wait_steps("latency")
    assert fast.rejections == other.rejections


@given(workloads())
def test_jumping_over_steps_changes_nothing(workload: tuple[Trace, SchedulerSettings]) -> None:
    trace, rules = workload
    _same(FastReplay(trace, rules).run(), StepByStepReplay(trace, rules).run())


@given(workloads(in_seconds=True))
def test_jumping_keeps_the_time(workload: tuple[Trace, SchedulerSettings]) -> None:
    trace, rules = workload
    fast, slow = FastReplay(trace, rules, COST).run(), StepByStepReplay(trace, rules, cost=COST).run()
    _same(fast, slow)
    assert fast.clocks is not None and slow.clocks is not None
    assert list(fast.clocks.finish_s) == pytest.approx(list(slow.clocks.finish_s))
    assert list(fast.clocks.token_s) == pytest.approx(list(slow.clocks.token_s))
    assert list(fast.clocks.sched_s) == pytest.approx(list(slow.clocks.sched_s))


MAY_COMPILE = is_compiled_before() or bool(os.environ.get("CI"))
"""Compiling takes half a minute once a machine, which continuous integration spends."""


@pytest.mark.skipif(not (numba_is_installed() and MAY_COMPILE), reason="nothing compiled on this machine yet")
@given(workloads())
def test_the_compiled_twin_decides_alike(workload: tuple[Trace, SchedulerSettings]) -> None:
    trace, rules = workload
    _same(FastReplay(trace, rules, use_numba=True).run(), FastReplay(trace, rules).run())


@given(
    st.builds(
        StepCost,
        *[st.floats(0, 2, allow_subnormal=False) for _ in range(5)],
        st.floats(0, 1),
        *[st.floats(0, 2, allow_subnormal=False) for _ in range(6)],
        st.integers(0, 60).map(float),
        st.floats(0, 2, allow_subnormal=False),
        st.floats(0, 40, allow_subnormal=False),
        st.floats(0, 2, allow_subnormal=False),
        st.floats(0.5, 1),
    ),
    st.integers(1, 50),
    st.integers(0, 500),
    st.integers(0, 60),
)
def test_a_span_takes_as_long_as_its_steps(cost: StepCost, running: int, stored: int, steps: int) -> None:
    one_by_one = sum(step_seconds(cost, running, stored + running * i, running) for i in range(steps))
    assert decode_steps_seconds(cost, running, stored, steps) == pytest.approx(one_by_one)
