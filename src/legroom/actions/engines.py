"""The processes of a vLLM server behind its API servers, known by descent and by the titles they give themselves."""

from __future__ import annotations

import re
import signal

from legroom.actions.descendants import descendants, send, title

_ENGINE = re.compile(rb"::(EngineCore|Worker|DPCoordinator)")
"""How vLLM titles the processes behind its API servers. Releases that do not have none that can be told apart."""


_API_SERVER = re.compile(rb"::APIServer")
"""One of several; a single API server is the server itself."""
_COORDINATOR = re.compile(rb"::DPCoordinator")


_ENGINE_CORE = re.compile(rb"::EngineCore")


def is_engine(pid: int) -> bool:
    return _ENGINE.search(title(pid)) is not None


def engine_cores(server: int) -> list[int]:
    """The engine cores below a server; none where a release gives them no title."""
    return [pid for pid in descendants(server) if _ENGINE_CORE.search(title(pid))]


def kill_engines(server: int) -> int:
    """SIGKILL to the engines below a server, so that its API servers answer what is in flight with an error; how many
    processes that were.

    A single API server sees its engine die. Several that share their engines (--api-server-count, data parallelism) do
    not, and must be told by the engine: an engine core whose worker dies tells them, and ends (0.32). Without workers
    of its own it cannot, so then it goes itself. The coordinator of data parallelism stays: when it dies, the API
    servers are stopped before the engines can tell them anything.
    """
    below = descendants(server)
    engines = [pid for pid in below if is_engine(pid)]
    if any(_API_SERVER.search(title(pid)) for pid in below):
        engines = [pid for pid in engines if not _COORDINATOR.search(title(pid))]
        engines = [pid for pid in engines if not any(is_engine(worker) for worker in descendants(pid))]
    return sum(send(pid, below[pid], signal.SIGKILL) for pid in engines)


def kill_api_servers(server: int) -> None:
    """SIGKILL to several API servers, and to what is left behind them."""
    below = descendants(server)
    if any(_API_SERVER.search(title(pid)) for pid in below):
        for pid, start in below.items():
            if _API_SERVER.search(title(pid)) or is_engine(pid):
                send(pid, start, signal.SIGKILL)
