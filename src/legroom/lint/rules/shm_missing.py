"""Containers of several ranks with 64 MiB of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.lint.rule import Context, LintFinding, Rule, finding
from legroom.units import MIB, human_bytes, parse_bytes

RULE = Rule(
    "shm-missing",
    "warning",
    "Several ranks in a container without shared memory",
    "Ranks communicate through /dev/shm, which has only 64 MiB in a container by default; NCCL and vLLM's queues need "
    "more (LR503).",
)
RULES = (RULE,)
_LEAST_BYTES = 512 * MIB
_HOW = {
    "docker": "add --ipc=host or --shm-size 4g",
    "compose": "add shm_size: 4gb (or ipc: host)",
    "kubernetes": "mount an emptyDir with medium: Memory at /dev/shm",
}


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """More than one GPU, and nothing or too little said about /dev/shm."""
    if not isinstance(subject, StartedServer) or not subject.in_container:
        return
    ranks = context.parsed(subject).args.engine_ranks
    if ranks < 2:
        return
    how = _HOW.get(subject.runs, "")
    if subject.shm is None:
        yield finding(RULE, subject.place, f"{ranks} ranks share 64 MiB of /dev/shm", how)
        return
    try:
        size = parse_bytes(subject.shm)
    except LegroomError:
        return
    if size < _LEAST_BYTES:
        message = f"{ranks} ranks share {human_bytes(size)} of /dev/shm: message queues alone are larger"
        yield finding(RULE, subject.place, message, how)
