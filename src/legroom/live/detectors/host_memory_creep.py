"""The host's memory that a server holds rises with uptime: in the end the kernel kills one of its processes."""

from __future__ import annotations

from collections.abc import Sequence

from legroom.live.detectors.memory_creep import MemoryCreep, MemorySeries
from legroom.live.forecast import Trend
from legroom.live.metrics.window import MemoryPoint


class HostMemoryCreep(MemoryCreep):
    """The slopes of the workers' and the API server's resident memory, judged as that of the GPUs is."""

    kind = "host_memory_creep"
    title = "host memory grows while it serves"
    what_helps = "a planned restart before the kernel kills a process of the server, and the release's fix for the leak"

    def series(self, points: list[MemoryPoint]) -> Sequence[MemorySeries]:
        """Of all workers together, where there is telemetry from inside them; every API server shows its own."""
        workers = [(point.time_s, float(point.host_rss_bytes)) for point in points if point.host_rss_bytes]
        api = [(point.time_s, float(point.api_server_rss_bytes)) for point in points if point.api_server_rss_bytes]
        return [(workers, "that the workers hold of the host"), (api, "that the API server holds of the host")]

    def hours_left(self, line: Trend, bytes_now: float) -> float | None:
        """Not known: how much the host has, and who else wants it, is not on the server's page."""
        return None
