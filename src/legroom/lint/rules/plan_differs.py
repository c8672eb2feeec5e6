"""Flags that differ from the plan."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.facts.flags import flag_name
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_place

_WHY = "The numbers of the plan hold for the planned flags only."
RULE = Rule("plan-differs", "warning", "Flags that differ from the plan", _WHY)
_COMPARED = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_memory_bytes",
)


@checks(StartedServer, RULE)
def flags_differ_from_plan(server: StartedServer, context: Context) -> Findings:
    """Flags of a server that differ from those of the plan given with --plan."""
    if (plan := context.plan_of(server)) is None:
        return
    args = context.parsed_args(server).args
    for dest in _COMPARED:
        given, planned = getattr(args, dest), plan.args.get(dest)
        if given is None or planned is None or given in (planned, -1):
            continue
        flag = flag_name(dest)
        message, suggestion = (
            f"{flag} is {given:g} here and {planned:g} in the plan",
            f"write {flag} {planned:g}, or plan again",
        )
        yield finding(RULE, flag_place(server, flag), message, suggestion, len(flag))
