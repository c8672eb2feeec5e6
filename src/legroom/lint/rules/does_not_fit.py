"""Models that the GPUs a file asks for cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.own_plan import own_plan
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding

if TYPE_CHECKING:
    from legroom.planning.plan import Plan

RULE = Rule(
    "does-not-fit",
    "error",
    "A server that does not fit the GPU that its file asks for",
    "The plan of the file's own model, flags and GPU ends without room for a KV cache: vLLM stops at the start.",
)
RULES = (RULE,)
_OF_WEIGHTS = ("weights_too_big", "loading_oom")


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """Only where the file names the model and the card, and its release is known."""
    if not isinstance(subject, StartedServer) or len(subject.gpu_names) != 1 or context.hides_release(subject):
        return
    own = own_plan(subject, context.release_of(subject))
    if own is None or not own.is_card_known or own.plan.verdict != "does_not_fit":
        return
    failure = own.plan.memory.failure
    message = f"it does not fit {subject.gpu_names[0]}: {failure.message if failure else own.plan.reason}"
    severity: Severity | None = None if _is_sure(own.plan) else "warning"
    yield finding(RULE, subject.place, message, "legroom plan --file FILE shows the flags that do", severity=severity)


def _is_sure(plan: Plan) -> bool:
    """Whether it does not fit at the kind end of the estimate either; the size of the weights is no estimate."""
    failure = plan.memory.failure
    if failure is None or failure.id in _OF_WEIGHTS:
        return True
    pool = min(rank.kv_cache.high for rank in plan.memory.ranks)
    return failure is plan.memory.kv.failure and failure.needed_bytes > pool
