"""The processes of a vLLM server behind its API servers, known by descent and by the titles they give themselves."""

from __future__ import annotations

import re
import signal

from legroom.actions.descendants import descendants, send, title

_ENGINE = re.compile(rb"::(EngineCore|Worker|DPCoordinator)")
"""How vLLM titles the processes behind its API servers. Releases that do not have none that can be told apart."""


def is_engine(pid: int) -> bool:
    return _ENGINE.search(title(pid)) is not None


def kill_engines(server: int) -> int:
    """SIGKILL to every engine below a server, and to nothing else of it; how many there were."""
    engines = {pid: start for pid, start in descendants(server).items() if is_engine(pid)}
    return sum(send(pid, start, signal.SIGKILL) for pid, start in engines.items())
