"""The workers' gauges on vLLM's metrics page. Import it after vLLM has imported `prometheus_client`, which chooses its
storage when it is imported."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import Gauge
from prometheus_client.core import GaugeMetricFamily

from legroom.worker.worker_memory import READ_INTERVAL_S, WorkerMemory

ReadWorkers = Callable[[float], tuple[WorkerMemory, ...]]
"""The figures that workers wrote within so many seconds: `TelemetryFolder.read`."""
MAX_AGE_S = 6 * READ_INTERVAL_S
"""Older figures are not exported: their worker hangs."""
LABELS = ("rank", "gpu")
MEASURES = {
    "used_bytes": "Memory in use on the worker's GPU, whoever holds it; of the process where it has no GPU.",
    "reserved_bytes": "Memory that PyTorch's allocator took from the GPU.",
    "allocated_bytes": "Of what the allocator reserves, what it handed out.",
    "active_bytes": "Handed out, or given back and still used by a stream.",
    "inactive_split_bytes": "Free, in segments that are partly in use: it cannot be returned to the GPU.",
    "largest_free_bytes": "The largest free piece of the allocator's common pool.",
    "graph_pool_bytes": "Reserved by the private pools of CUDA graphs.",
    "non_torch_bytes": "Held by the worker on the GPU beside what the allocator reserves.",
    "others_bytes": "Held by other processes on the worker's GPU.",
    "peak_allocated_bytes": "The most that was handed out at once since the previous reading, five seconds earlier.",
    "alloc_retries": "How often the allocator had to return its cache to the GPU to serve a request.",
    "host_rss_bytes": "What the worker's process holds of the host's memory.",
    "host_pinned_bytes": "Of that, what PyTorch pinned for copies to and from the GPU.",
}


class WorkerCollector:
    """Reads the workers' files at each scrape, in a server with one API server process."""

    def __init__(self, read: ReadWorkers) -> None:
        self._read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Families without samples, so that registering reads no files."""
        return (_gauge_family(name) for name in MEASURES)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The workers' gauges, one sample for each rank and GPU; without those whose worker wrote nothing lately."""
        memory = self._read(MAX_AGE_S)
        for name in MEASURES:
            family = _gauge_family(name)
            for labels, value in _values_by_device(memory, name).items():
                family.add_metric(labels, value)
            yield family


def _gauge_family(name: str) -> GaugeMetricFamily:
    """The gauge of one of MEASURES, still without samples."""
    return GaugeMetricFamily(f"legroom_worker_{name}", MEASURES[name], labels=LABELS)


def _values_by_device(memory: tuple[WorkerMemory, ...], name: str) -> dict[tuple[str, str], float]:
    """The measure `name` by (rank, GPU), summed over engines, each of which counts its ranks from 0."""
    rows: dict[tuple[str, str], float] = defaultdict(float)
    for device in memory:
        value = getattr(device, name)
        if value is not None:
            rows[str(device.rank), device.gpu] += value
    return rows


class SharedGauges:
    """Gauges that workers write themselves, where several API servers share prometheus_client's files."""

    def __init__(self) -> None:
        self._gauges = {
            name: Gauge(f"legroom_worker_{name}", about, LABELS, multiprocess_mode="livesum")
            for name, about in MEASURES.items()
        }

    def write(self, memory: tuple[WorkerMemory, ...]) -> bool:
        """Set the gauges to the figures of this process; always True: there is no folder that could be removed."""
        for name, gauge in self._gauges.items():
            for labels, value in _values_by_device(memory, name).items():
                gauge.labels(*labels).set(value)
        return True
