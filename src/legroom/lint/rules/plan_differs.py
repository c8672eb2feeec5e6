"""A server that is not the planned one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.facts.flags import flag_name
from legroom.lint.rule import Context, LintFinding, Rule, finding, flag_word

RULE = Rule(
    "plan-differs",
    "warning",
    "Flags that differ from the plan",
    "The numbers of the plan hold for the planned flags only.",
)
RULES = (RULE,)
_COMPARED = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_memory_bytes",
)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Settings that memory follows from, where both say one."""
    if not isinstance(subject, StartedServer) or (plan := context.plan_of(subject)) is None:
        return
    args = context.parsed(subject).args
    for dest in _COMPARED:
        given, planned = getattr(args, dest), plan.args.get(dest)
        if given is None or planned is None or given in (planned, -1):
            continue
        flag = flag_name(dest)
        word = flag_word(subject, flag, "-tp", "-pp") if dest.endswith("parallel_size") else flag_word(subject, flag)
        place = subject.place_of(word) if word else subject.place
        message = f"{flag} is {given:g} here and {planned:g} in the plan"
        yield finding(RULE, place, message, f"write {flag} {planned:g}, or plan again", len(flag))
