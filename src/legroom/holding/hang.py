"""A server that hangs while it serves, told from one that is busy and from one that nobody asks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from legroom.actions.child import Child
from legroom.actions.descendants import cpu_ticks, descendants, title

LOOKS = 4
"""How many looks in a row must find it hanging."""
_ASK_S = 5.0
"""How long a look waits for an answer, at most."""
_ENGINE = re.compile(rb"::(EngineCore|Worker|DPCoordinator)")
"""How vLLM titles the processes behind its API servers. Releases that do not are never said to hang."""


class HangWatch:
    """Neither work nor an answer, look after look: then it hangs.

    The event loop of an API server wakes up ten times a second (uvicorn), so one that lives uses CPU time even while
    nobody asks it anything, and a busy one uses much: neither is ever asked, and neither can be taken for one that
    hangs. Only a server that has used none since the last look is asked whether it answers.
    """

    def __init__(
        self,
        patience_s: float,
        used: Callable[[], int | None],
        answers: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = patience_s / LOOKS
        self._used, self._answers, self._clock = used, answers, clock
        self._before = used()
        self._silent = 0
        self._due_s = clock() + self._every_s

    def left_s(self) -> float | None:
        """How long until the next look; None where there is none."""
        return max(self._due_s - self._clock(), 0.0) if self._every_s else None

    def hangs(self) -> bool:
        """Look, if it is time to; whether it has hung for as long as the patience lasts."""
        if self.left_s() != 0.0:
            return False
        self._due_s = self._clock() + self._every_s
        used = self._used()
        works = used is None or used != self._before
        self._before = used
        self._silent = 0 if works or self._answers(min(_ASK_S, self._every_s)) else self._silent + 1
        return self._silent >= LOOKS


def ticks_in_front(child: Child) -> Callable[[], int | None]:
    """The CPU time of everything of a server but its engines, which may wait in a loop: of its API servers, and of what
    stands above them (`uv run`, `sudo`). None where one has gone, is debugged, or may be kept from printing."""
    server = child.pid
    assert server is not None

    def used() -> int | None:
        front = [pid for pid in (server, *descendants(server)) if not _ENGINE.search(title(pid))]
        ticks = [cpu_ticks(pid) for pid in front]
        if child.is_held_up or None in ticks:
            return None
        return sum(one or 0 for one in ticks) or None  # a system that counts no CPU time cannot tell work from none

    return used
