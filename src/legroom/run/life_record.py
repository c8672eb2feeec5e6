"""What is kept of one life of a server for its diagnosis: what it printed, and the kernel's account of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legroom.actions.server_log import ServerLog, last_lines
from legroom.live.host_memory import Cgroup, KernelAccount

_NOT_WRITTEN = "the log cannot be written (is the disk full?): its newest lines are kept in memory"


class LifeRecord:
    """Begun before the server is started, read when it has ended."""

    def __init__(self, path: Path) -> None:
        self.log = ServerLog(path)
        self._account = KernelAccount.of()
        self._is_problem_told = False

    def follow(self, pid: int | None) -> None:
        """Where the server's memory is accounted for: a wrapper may move it into a cgroup of its own, as late as it
        likes before vLLM itself begins."""
        if pid is None:
            return
        cgroup, current = Cgroup.of(pid), self._account.cgroup
        if cgroup is None or cgroup == current:
            return
        # A process that has ended is shown at the top of the hierarchy until it is collected: it has not moved there.
        if current is None or not Path(current.folder).is_relative_to(cgroup.folder):
            self._account = KernelAccount.of(pid)

    def tell_problem(self, say: Callable[[str], None]) -> None:
        """That the disk does not take the log, once."""
        if self.log.problem and not self._is_problem_told:
            self._is_problem_told = True
            say(_NOT_WRITTEN)

    def last_lines(self, count: int) -> list[str]:
        return last_lines(self.log.readable(), count)

    def question(self) -> dict[str, Any]:
        """As a task takes it."""
        return {"log": str(self.log.readable()), "account": asdict(self._account)}


def account_of(document: dict[str, Any]) -> KernelAccount:
    """What `question` made of it."""
    cgroup = document["cgroup"]
    return KernelAccount(**{**document, "cgroup": Cgroup(**cgroup) if cgroup else None})
