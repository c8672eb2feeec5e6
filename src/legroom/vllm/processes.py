"""The processes of a vLLM server behind its API servers, known by descent and by the titles they give themselves.

Releases that give no titles have none that can be told apart.
"""

from __future__ import annotations

import re

from legroom.process_table import ProcessTable, descendants, title

_ENGINE = re.compile(rb"::(EngineCore|Worker|DPCoordinator)")
_ENGINE_CORE = re.compile(rb"::EngineCore")
_COORDINATOR = re.compile(rb"::DPCoordinator")
_API_SERVER = re.compile(rb"::APIServer")
_SHARES_ENGINES = re.compile(rb"::APIServer_\d+[\s\0]*$")


def is_engine(pid: int) -> bool:
    """Whether it works behind the API servers: an engine core, a worker, or the coordinator of data parallelism."""
    return _ENGINE.search(title(pid)) is not None


def is_engine_core(pid: int) -> bool:
    return _ENGINE_CORE.search(title(pid)) is not None


def is_coordinator(pid: int) -> bool:
    """Of data parallelism."""
    return _COORDINATOR.search(title(pid)) is not None


def is_api_server(pid: int) -> bool:
    """Whether it is one of several; a single one is the server itself, and has no title."""
    return _API_SERVER.search(title(pid)) is not None


def shares_engines(pid: int) -> bool:
    """Whether it is one of several API servers before the same engines, which are then beside it and not below."""
    return _SHARES_ENGINES.search(title(pid)) is not None


def engines_below(server: int, table: ProcessTable | None = None) -> dict[int, int]:
    """Pid -> start time of the engines of a server."""
    return {pid: start for pid, start in descendants(server, table).items() if is_engine(pid)}
