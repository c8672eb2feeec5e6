"""The options of `legroom run`."""

from typing import Literal

from legroom.records import dataclass

OnCrash = Literal["restart", "exit"]


@dataclass(frozen=True)
class Timing:
    """Poll interval and timeouts of the supervisor."""

    poll_interval_s: float = 1.0
    """Between health checks of a starting server."""
    port_timeout_s: float = 10.0
    """How long the kernel may take to free the port of an ended server."""
    leftover_grace_s: float = 3.0
    """How long engine cores and resource trackers may outlive their server."""


DEFAULT_TIMING = Timing()


@dataclass(frozen=True)
class RunOptions:
    words: tuple[str, ...]
    tries: int = 3
    keep: tuple[str, ...] = ()
    """Flags that must not change, as the user wrote them."""
    min_context: int | None = None
    min_concurrency: float | None = None
    on_crash: OnCrash = "restart"
    restarts: int = 5
    """Restarts after crashes per hour."""
    restart_delay_s: float = 2.0
    """Before the first restart; doubles with each further one within an hour."""
    ready_timeout_s: float = 1800.0
    hang_timeout_s: float = 120.0
    """How long a server may neither use CPU time nor answer; 0: for ever."""
    drain_s: float = 60.0
    verify: bool = True
    save: str | None = None
    vllm: str | None = None
    gpu: str | None = None
