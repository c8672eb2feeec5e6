"""Servers that do not fit the GPU that their file requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding
from legroom.lint.server_plan import plan_of_server

if TYPE_CHECKING:
    from legroom.planning.plan import Plan

RULE = Rule(
    "does-not-fit",
    "error",
    "A server that does not fit the GPU that its file asks for",
    "The plan of the file's own model, flags and GPU ends without room for a KV cache: vLLM stops at the start.",
)
_WEIGHT_FAILURES = ("weights_too_big", "loading_oom")


@checks(StartedServer, RULE)
def does_not_fit(server: StartedServer, context: Context) -> Findings:
    if len(server.gpu_names) != 1 or context.has_unknown_release(server):
        return
    own = plan_of_server(server, context.release_of(server))
    if own is None or not own.is_gpu_known or own.plan.verdict != "does_not_fit":
        return
    failure = own.plan.memory.failure
    message = f"it does not fit {server.gpu_names[0]}: {failure.message if failure else own.plan.reason}"
    suggestion = "legroom plan --file FILE shows the flags that do"
    yield finding(RULE, server.place, message, suggestion, is_certain=_fails_in_whole_band(own.plan))


def _fails_in_whole_band(plan: Plan) -> bool:
    """Whether it does not fit with the largest estimated KV cache either. The size of the weights is exact."""
    failure = plan.memory.failure
    if failure is None or failure.id in _WEIGHT_FAILURES:
        return True
    pool = min(rank.kv_cache.high for rank in plan.memory.ranks)
    return failure is plan.memory.kv.failure and failure.needed_bytes > pool
