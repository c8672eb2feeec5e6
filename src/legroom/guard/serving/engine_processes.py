"""The engine's processes, as an API server sees them: whether somebody has stopped one."""

from __future__ import annotations

import os

from legroom.process_table import engines_below, is_stopped, shares_engines


class EngineProcesses:
    """Those behind the API server that this process is."""

    def __init__(self) -> None:
        self._pids: tuple[int, ...] = ()

    def stopped(self) -> int | None:
        """How many a signal has stopped; None where none can be told apart. They are looked for once: an engine that
        ends takes the server along."""
        if not self._pids:
            own = os.getpid()
            self._pids = tuple(engines_below(os.getppid() if shares_engines(own) else own))
        return sum(map(is_stopped, self._pids)) if self._pids else None
