"""From the plain values of a call (an agent's tool, an HTTP endpoint) to the typed objects below."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.diagnosis.starting_plan import is_local
from legroom.errors import LegroomError
from legroom.vllm.command_line import any_release_words

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.facts.releases import Release
    from legroom.planning.machine import Machine
    from legroom.planning.plan import Plan
    from legroom.simulation.scheduler_settings import SchedulerSettings
    from legroom.simulation.trace import Trace
    from legroom.vllm.flag_problems import FlagProblem

MOST_REQUESTS = 50_000
"""A replay of more belongs on the command line, not in a conversation."""
MOST_ASYNC = 2_000
"""Requests up to which a planned deployment is replayed a batch ahead, as on a GPU: step by step."""
_MODEL_NAME_PARTS = 2


def deployment(
    model: str | None, command: str | None, flags: Mapping[str, Any] | None, vllm: str | None, local_files: bool
) -> Deployment:
    """The flags of `command`, or those of `model` and `flags`; refused where vLLM would refuse them."""
    from legroom.facts.releases import latest
    from legroom.facts.releases import release as known_release

    asked = known_release(vllm) if vllm else None
    if (model is None) == (command is None):
        raise LegroomError("say what runs once", "give `model` (with `flags`), or `command`, not both and not neither")
    if command is not None:
        if flags:
            raise LegroomError("`flags` belong to `model`", "write them into `command`")
        from legroom.deployments.deployment import deployment_from_command

        written = deployment_from_command(command, asked)
        _refuse(written.problems, written.release)
        refuse_local(written.args.model, local_files)
        return replace(written, notes=(*written.notes, *(problem.message for problem in written.problems)))
    from legroom.deployments.deployment import Deployment
    from legroom.vllm.parse import parse_flags

    release = asked or latest()
    assert model is not None
    refuse_local(model, local_files)
    parsed = parse_flags([model, *any_release_words(flags or {})], release)
    _refuse(parsed.problems, release)
    return Deployment(parsed.args, release, notes=tuple(problem.message for problem in parsed.problems))


def planned(what: Deployment, where: Machine, *, advice: bool) -> Plan:
    """The plan of a call; a command may say how many GPUs it uses where the call does not."""
    from legroom.planning.machine import make_plan

    machine = where if where.gpus is not None else replace(where, gpus=what.gpu_count)
    return make_plan(what.args, what.release, machine, advice=advice)


def trace_of(requests: Sequence[Mapping[str, Any]] | None, mix: str | None) -> Trace:
    """The load of a simulate call: requests one by one, or a made-up mix."""
    if (requests is None) == (mix is None):
        raise LegroomError("say what the load is once", "give `requests` or `mix`")
    if mix is not None:
        from legroom.simulation.traces import synthetic

        trace = synthetic.read(mix)
    else:
        from legroom.simulation.traces import jsonl

        assert requests is not None
        trace = jsonl.read((json.dumps(request) for request in requests[: MOST_REQUESTS + 1]), "requests")
    if len(trace) > MOST_REQUESTS:
        hint = f"at most {MOST_REQUESTS:,}; legroom simulate on the command line takes millions"
        raise LegroomError(f"{len(trace):,} requests are more than a call may bring", hint)
    return trace.checked()


def replayed(
    trace: Trace, plan: Plan | None, given: Mapping[str, int | bool | None], step_ms: float | None
) -> dict[str, Any]:
    """What became of the load, and how the GPU's name was read where it leaves that open."""
    from legroom.simulation.step_time import fixed
    from legroom.simulation.trace_replay import simulate

    if trace.in_seconds and step_ms is None:
        raise LegroomError("arrivals are in seconds, and how long a step takes is not known", "give step_ms, e.g. 30")
    settings = scheduler_settings(trace, plan, given)
    document = simulate(trace, settings, cost=fixed(step_ms / 1000) if step_ms else None).as_json()
    note = plan.target.gpu.note if plan is not None else ""
    return {**document, "notes": [note]} if note else document


def scheduler_settings(trace: Trace, plan: Plan | None, given: Mapping[str, int | bool | None]) -> SchedulerSettings:
    """What was given, the plan's settings where there is one, vLLM's usual values for the rest."""
    from legroom.simulation.scheduler_settings import SchedulerSettings

    values: dict[str, Any] = {}
    if plan is not None:
        if plan.verdict == "does_not_fit" and given.get("num_blocks") is None:
            raise LegroomError(
                f"this deployment does not start ({plan.reason}), so there is no pool to simulate",
                "call plan for the flags that fix it, or give num_blocks",
            )
        from legroom.simulation.from_plan import deployed

        values = dict(deployed(plan).flags)
        if len(trace) > MOST_ASYNC:
            # Deciding a step ahead changes little and only the step-by-step replay knows it.
            values["async_scheduling"] = False
    values |= {name: value for name, value in given.items() if value is not None}
    if "num_blocks" not in values:
        raise LegroomError("how large is the pool?", "give num_blocks, or model and gpu to plan it")
    if "max_model_len" not in values:
        pairs = zip(trace.prompt_lens, trace.output_lens, strict=True)
        values["max_model_len"] = max((prompt + output for prompt, output in pairs), default=1)
    return SchedulerSettings(**values)


def _refuse(problems: Sequence[FlagProblem], release: Release) -> None:
    fatal = [problem for problem in problems if problem.stops_vllm]
    if fatal:
        hints = [f"instead of {problem.flag}: {problem.instead}" for problem in fatal if problem.instead]
        raise LegroomError(
            "; ".join(problem.message for problem in fatal),
            "; ".join(hints) or f"vLLM {release} stops at it: leave it out",
        )


def refuse_local(model: str, local_files: bool) -> None:
    """Over HTTP a caller may be on another machine: files of this one are none of its business."""
    if not local_files and (is_local(model) or len(model.split("/")) > _MODEL_NAME_PARTS):
        raise LegroomError(f"{model!r} is no name of a model", "over HTTP give a Hub id or a bundled name, not a path")
