"""`legroom.simulate`, and the simulation of an HTTP or MCP request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.explain.catalog_entries import title_of_label
from legroom.simulation.scheduler_settings import SchedulerSettings

if TYPE_CHECKING:
    from legroom.planning.plan import Plan
    from legroom.simulation.scheduler_settings import SchedulerSettings
    from legroom.simulation.timeline import Timeline
    from legroom.simulation.trace import Trace

MAX_REQUESTS = 50_000
"""Largest trace of an HTTP or MCP request; the command line has no limit."""


def simulate(trace: Trace | str, settings: SchedulerSettings, **options: Any) -> Timeline:
    """Replays a trace, or that in a file, through vLLM's scheduler; `options`: those of `trace_replay.simulate`."""
    from legroom.simulation.trace_replay import simulate as replay_trace
    from legroom.simulation.traces.trace_files import read_trace

    return replay_trace(read_trace(trace) if isinstance(trace, str) else trace, settings, **options)


def trace_of_request(requests: Sequence[Mapping[str, Any]] | None, mix: str | None) -> Trace:
    """The trace of a list of requests or of a synthetic `mix`; LegroomError for both, neither or too many."""
    if (requests is None) == (mix is None):
        raise LegroomError("say what the load is once", "give `requests` or `mix`")
    if mix is not None:
        from legroom.simulation.traces import synthetic

        trace = synthetic.read(mix)
    else:
        from legroom.simulation.traces import jsonl

        assert requests is not None
        trace = jsonl.read((json.dumps(request) for request in requests[: MAX_REQUESTS + 1]), "requests")
    return bounded_trace(trace)


def bounded_trace(trace: Trace) -> Trace:
    """The checked trace; LegroomError if invalid or with more requests than one HTTP or MCP call may have."""
    if len(trace) > MAX_REQUESTS:
        hint = f"at most {MAX_REQUESTS:,}; legroom simulate on the command line takes millions"
        raise LegroomError(f"{len(trace):,} requests are more than a call may bring", hint)
    return trace.checked()


def simulation_json(
    trace: Trace, plan: Plan | None, given: Mapping[str, int | bool | None], step_ms: float | None
) -> dict[str, Any]:
    """The JSON document of a replay; `given` are scheduler settings by name (None: the plan's or vLLM's default).

    LegroomError where the trace has its arrivals in seconds and `step_ms`, the length of a step, is None.
    """
    from legroom.simulation.replay_outcome import load_verdict
    from legroom.simulation.step_time import fixed_cost
    from legroom.simulation.trace_replay import simulate

    if trace.in_seconds and step_ms is None:
        raise LegroomError("arrivals are in seconds, and how long a step takes is not known", "give step_ms, e.g. 30")
    trace = trace.of_engine(plan.settings.data_parallel_size if plan else 1)
    settings = requested_settings(trace, plan, given)
    timeline = simulate(trace, settings, cost=fixed_cost(step_ms / 1000) if step_ms else None)
    document = {**timeline.as_json(), **load_verdict(timeline).as_json()}
    note = plan.target.gpu.note if plan is not None else ""
    return {**document, "notes": [note]} if note else document


def requested_settings(trace: Trace, plan: Plan | None, settings: Mapping[str, int | bool | None]) -> SchedulerSettings:
    """The `settings` that are not None, else the plan's, else vLLM's defaults; LegroomError without num_blocks."""
    values: dict[str, Any] = {}
    if plan is not None:
        if plan.verdict == "does_not_fit" and settings.get("num_blocks") is None:
            why = f"this deployment does not start ({title_of_label(plan.reason)}), so there is no pool to simulate"
            raise LegroomError(why, "plan it for the flags that fix it, or give the number of blocks")
        from legroom.simulation.from_plan import planned_scheduler

        values = dict(planned_scheduler(plan).flags)
    values |= {name: value for name, value in settings.items() if value is not None}
    if "num_blocks" not in values:
        raise LegroomError("how large is the pool?", "give num_blocks, or model and gpu to plan it")
    values.setdefault("max_model_len", trace.longest)
    return SchedulerSettings(**values)
