"""Containers of several ranks with 64 MiB of shared memory."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.lint.rule import Context, Findings, Rule, checks, finding
from legroom.units import MIB, human_bytes, parse_bytes

_WHY = (
    "Ranks communicate through /dev/shm, which has only 64 MiB in a container by default; NCCL and vLLM's queues need "
    "more (LR503)."
)
RULE = Rule("shm-missing", "warning", "Several ranks in a container without shared memory", _WHY)
_SUGGESTIONS = {
    "docker": "add --ipc=host or --shm-size 4g",
    "compose": "add shm_size: 4gb (or ipc: host)",
    "kubernetes": "mount an emptyDir with medium: Memory at /dev/shm",
}


@checks(StartedServer, RULE)
def too_little_shared_memory(server: StartedServer, context: Context) -> Findings:
    """A container with several ranks and less than 512 MiB of /dev/shm."""
    ranks = context.parsed_args(server).args.engine_ranks
    if not server.in_container or ranks < 2 or not server.runs_on_gpus:
        return
    suggestion = _SUGGESTIONS.get(server.runs, "")
    if server.shm is None:
        yield finding(RULE, server.place, f"{ranks} ranks share 64 MiB of /dev/shm", suggestion)
        return
    try:
        size = parse_bytes(server.shm)
    except LegroomError:
        return
    if size < 512 * MIB:
        message = f"{ranks} ranks share {human_bytes(size)} of /dev/shm: message queues alone are larger"
        yield finding(RULE, server.place, message, suggestion)
