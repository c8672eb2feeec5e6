"""The endpoint that simulates a load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError

if TYPE_CHECKING:
    from legroom.simulation.trace import Trace

_SCHEDULER_FIELDS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching")


def simulate(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom simulate --json`, and the pool over time."""
    from legroom.api.simulate_request import scheduler_settings
    from legroom.simulation.from_plan import hardware
    from legroom.simulation.step_time import fixed, roofline
    from legroom.simulation.timeline import pool_curves_json
    from legroom.simulation.trace_replay import simulate as replay
    from legroom.web.endpoints.plans import plan_of_request

    trace = _trace(request)
    planned = request.get("plan")
    plan = plan_of_request(planned, advice=False) if planned is not None else None
    given = {name: request.get(name) for name in _SCHEDULER_FIELDS} | {"num_blocks": request.get("blocks")}
    # Asynchronous scheduling changes little, and needs the slow step-by-step simulation.
    settings = replace(scheduler_settings(trace, plan, given), async_scheduling=False)
    step_ms = request.get("step_ms")
    cost = fixed(step_ms / 1000) if step_ms else roofline(hardware(plan)) if plan and trace.in_seconds else None
    if trace.in_seconds and cost is None:
        raise LegroomError(
            "arrivals are in seconds, and how long a step takes is not known",
            "give `plan` to have it estimated, or `step_ms`",
        )
    timeline = replay(trace, settings, cost=cost)
    return {**timeline.as_json(), "timeline": pool_curves_json(timeline)}


def _trace(request: dict[str, Any]) -> Trace:
    from legroom.api.simulate_request import MOST_REQUESTS

    text, mix = request.get("trace"), request.get("mix")
    if (text is None) == (mix is None):
        raise LegroomError("say what the load is once", "give `trace`, its text, or `mix`")
    if text is not None:
        from legroom.simulation.traces.trace_files import read_trace_text

        trace = read_trace_text(text)
    else:
        assert mix is not None
        from legroom.simulation.traces import synthetic

        trace = synthetic.read(
            f"poisson rate={mix.get('rate_per_s', 8)} requests={mix.get('requests', 300)} "
            f"prompt=lognormal({mix.get('prompt_tokens', 1000)},0.8) "
            f"output=lognormal({mix.get('output_tokens', 300)},0.6)",
            mix.get("seed", 0),
        )
    if len(trace) > MOST_REQUESTS:
        hint = f"at most {MOST_REQUESTS:,}; legroom simulate on the command line takes millions"
        raise LegroomError(f"{len(trace):,} requests are more than a page replays", hint)
    return trace.checked()
