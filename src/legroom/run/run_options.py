"""What `legroom run` was asked to do."""

from __future__ import annotations

from typing import Literal

from legroom.records import dataclass

OnCrash = Literal["restart", "exit"]


@dataclass(frozen=True)
class Timing:
    """How often a supervisor looks, and how patient it is where nothing tells it."""

    poll_interval_s: float = 1.0
    """Between looks at whether a starting server is healthy."""
    port_timeout_s: float = 10.0
    """How long the kernel may take to free the port of a server that is gone."""
    leftover_grace_s: float = 3.0
    """How long what a server leaves behind may take to end by itself: engine cores notice, trackers clean up."""


DEFAULT_TIMING = Timing()


@dataclass(frozen=True)
class RunOptions:
    """The options of one `legroom run`. Times in seconds."""

    words: tuple[str, ...]
    tries: int = 3
    keep: tuple[str, ...] = ()
    """As the user wrote them."""
    min_context: int | None = None
    min_concurrency: float | None = None
    on_crash: OnCrash = "restart"
    restarts: int = 5
    """How many restarts after crashes an hour may have."""
    restart_delay_s: float = 2.0
    """Before the first restart; doubles with every further one of the hour."""
    ready_timeout_s: float = 1800.0
    hang_timeout_s: float = 120.0
    """How long a server may neither work nor answer; 0: for ever."""
    drain_s: float = 60.0
    verify: bool = True
    save: str | None = None
    vllm: str | None = None
    gpu: str | None = None
