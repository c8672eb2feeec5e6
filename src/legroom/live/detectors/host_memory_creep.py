"""The host's memory that a server's workers hold rises with uptime: in the end the kernel kills one of them."""

from __future__ import annotations

from legroom.live.detectors.memory_creep import MemoryCreep
from legroom.live.forecast import Trend
from legroom.live.metrics.window import MemoryPoint


class HostMemoryCreep(MemoryCreep):
    """The slope of the workers' resident memory, judged as that of the GPUs is."""

    kind = "host_memory_creep"
    title = "host memory grows while it serves"
    what_helps = "a planned restart before the kernel kills a worker, and the release's fix for the leak"

    def series(self, points: list[MemoryPoint]) -> tuple[list[tuple[float, float]], str]:
        """Of all workers together; it needs telemetry from inside them."""
        rss = [(point.time_s, float(point.host_rss_bytes)) for point in points if point.host_rss_bytes]
        return rss, "that the workers hold of the host"

    def hours_left(self, line: Trend, bytes_now: float) -> float | None:
        """Not known: how much the host has, and who else wants it, is not on the server's page."""
        return None
