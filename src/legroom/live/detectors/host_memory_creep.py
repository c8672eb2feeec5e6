"""A server's host memory grows until the kernel kills one of its processes."""

from collections.abc import Sequence

from legroom.live.detectors.memory_creep import MemoryCreep, MemorySeries
from legroom.live.metrics.window import MemoryPoint


class HostMemoryCreep(MemoryCreep):
    """Slopes of the resident memory of workers and API server, by the same levels as GPU memory."""

    kind = "host_memory_creep"
    title = "host memory grows while it serves"
    of_gpus = False  # the server does not report how much memory the host has

    def series(self, points: list[MemoryPoint]) -> Sequence[MemorySeries]:
        """Resident memory of all workers (worker plugin) and of the API server (its own /metrics)."""
        workers = [(point.time_s, float(point.host_rss_bytes)) for point in points if point.host_rss_bytes]
        api = [(point.time_s, float(point.api_server_rss_bytes)) for point in points if point.api_server_rss_bytes]
        return [(workers, "that the workers hold of the host"), (api, "that the API server holds of the host")]
