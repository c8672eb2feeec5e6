"""Memory limits of containers that a server cannot live in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding
from legroom.memory.host_needs import HostSettings, host_needs
from legroom.units import human_bytes

RULE = Rule(
    "host-memory",
    "error",
    "A memory limit below what the processes hold",
    "Every GPU has a worker process beside the API server and the engine; above the limit the kernel ends one of them "
    "(exit code 137, OOMKilled), whatever the GPU has left (LR501).",
)
RULES = (RULE,)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """The limit against the least that so many ranks hold on a GPU; servers without one are smaller."""
    if not isinstance(subject, StartedServer) or not subject.memory_limit_bytes or not subject.gpu_count:
        return
    args = context.parsed(subject).args
    ranks = min(args.engine_ranks, subject.gpu_count)
    engines = max(min(args.gpus_needed, subject.gpu_count) // ranks, 1)
    needs = host_needs(HostSettings(args, context.release_of(subject), ranks * engines, engines))
    if subject.memory_limit_bytes < needs.least_bytes:
        limit, least = human_bytes(subject.memory_limit_bytes), human_bytes(needs.least_bytes)
        count = ranks * engines
        hold = f"{count} ranks hold" if count > 1 else "one rank holds"
        message = f"the container may use {limit} of the host's memory, and {hold} at least {least}"
        suggestion = f"allow at least {human_bytes(needs.request_bytes)}"
        # With which processes vLLM serves the model, if it does, is the launcher's matter.
        severity: Severity | None = "warning" if subject.launcher else None
        yield finding(RULE, subject.place, message, suggestion, severity=severity)
