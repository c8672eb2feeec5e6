"""Container memory limits below what the processes need."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding
from legroom.memory.host_needs import HostSettings, host_needs
from legroom.units import human_bytes

_WHY = (
    "Every GPU has a worker process beside the API server and the engine; above the limit the kernel ends one of them "
    "(exit code 137, OOMKilled), whatever the GPU has left (LR501)."
)
RULE = Rule("host-memory", "error", "A memory limit below what the processes hold", _WHY)


@checks(StartedServer, RULE)
def host_memory_limit_too_low(server: StartedServer, context: Context) -> Findings:
    """A container memory limit below the host memory that the server's processes hold."""
    if not server.memory_limit_bytes or not server.gpu_count:
        return
    args = context.parsed_args(server).args
    ranks = min(args.engine_ranks, server.gpu_count)
    engines = max(min(args.gpus_needed, server.gpu_count) // ranks, 1)
    needs = host_needs(HostSettings(args, context.release_of(server), ranks * engines, engines))
    if server.memory_limit_bytes >= needs.held_bytes:
        return
    is_short = server.memory_limit_bytes < needs.least_bytes
    limit, held = human_bytes(server.memory_limit_bytes), needs.least_bytes if is_short else needs.held_bytes
    count, verb = ranks * engines, "hold at least" if is_short else "may come to hold"
    ranks_text = f"{count} ranks {verb}" if count > 1 else f"one rank {verb.replace('hold at', 'holds at')}"
    message = f"the container may use {limit} of the host's memory, and {ranks_text} {human_bytes(held)}"
    suggestion = f"allow at least {human_bytes(needs.request_bytes)}"
    # A launcher chooses the processes itself.
    yield finding(RULE, server.place, message, suggestion, is_certain=is_short and not server.launcher)
