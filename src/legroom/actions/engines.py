"""A vLLM server without its engines: so its API servers answer their clients at once."""

from __future__ import annotations

import signal

from legroom.actions.descendants import send
from legroom.process_table import ProcessTable, descendants, engines_below, is_api_server, is_coordinator, process_table


def kill_engines(server: int) -> int:
    """SIGKILL to the engines below a server, so that its API servers answer what is in flight with an error; how many
    processes that were.

    A single API server sees its engine die. Several that share their engines (--api-server-count, data parallelism) do
    not, and must be told by the engine: an engine core whose worker dies tells them, and ends (0.32). Without workers
    of its own it cannot, so then it goes itself. The coordinator of data parallelism stays: when it dies, the API
    servers are stopped before the engines can tell them anything.

    One look at the table of processes is enough: on a busy machine every further one may cost a tenth of a second.
    """
    table = process_table()
    engines = engines_below(server, table)
    if has_several_api_servers(server, table):
        engines = {
            pid: start for pid, start in engines.items() if not is_coordinator(pid) and not engines_below(pid, table)
        }
    return sum(send(pid, start, signal.SIGKILL) for pid, start in engines.items())


def has_several_api_servers(server: int, table: ProcessTable | None = None) -> bool:
    """Whether the server is the process that waits for API servers below it, and not the only one itself."""
    return any(is_api_server(pid) for pid in descendants(server, table))
