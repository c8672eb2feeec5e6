"""`simulate`: a trace and settings in, a timeline out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from legroom.errors import LegroomError
from legroom.simulation.fast.columns import StepCost
from legroom.simulation.fast.engine import FastReplay, Outgrown, Progress, can_replay
from legroom.simulation.fast.jit import is_compiled_before, numba_is_installed
from legroom.simulation.reference import Reference
from legroom.simulation.settings import SchedulerSettings
from legroom.simulation.timeline import ScheduledStep, Timeline
from legroom.simulation.trace import Trace

Engine = Literal["auto", "reference", "fast", "compiled"]

_WORTH_COMPILING, _WORTH_LOADING = 400_000, 20_000
"""Requests from which Numba pays: compiling takes tens of seconds, once a machine; loading half a second."""


def simulate(
    trace: Trace,
    settings: SchedulerSettings,
    on_step: Callable[[ScheduledStep], None] | None = None,
    *,
    cost: StepCost | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
    replays: int = 1,
) -> Timeline:
    """Replay `trace` through vLLM's scheduling decisions.

    `on_step` sees every step in which something was scheduled. `cost` is what steps take when the trace tells arrivals
    in seconds (see `steptime`). All engines decide alike; `replays` says how many such replays are to come.
    """
    trace = trace.checked()
    if trace.in_seconds and cost is None:
        raise LegroomError(
            f"{trace.name} tells arrivals in seconds, so steps need a duration",
            "give a GPU and a model, or --step-ms",
        )
    chosen = _choose_engine(trace, settings, on_step is not None, replays) if engine == "auto" else engine
    if chosen != "reference":
        try:
            return FastReplay(trace, settings, cost, use_numba=chosen == "compiled").run(progress)
        except Outgrown:
            pass
    return Reference(trace, settings, on_step, cost, progress).run()


def _choose_engine(trace: Trace, settings: SchedulerSettings, every_step: bool, replays: int) -> Engine:
    if every_step or not can_replay(settings):
        return "reference"
    work = len(trace) * replays
    if work < _WORTH_LOADING or not numba_is_installed():
        return "fast"
    return "compiled" if work >= _WORTH_COMPILING or is_compiled_before() else "fast"
