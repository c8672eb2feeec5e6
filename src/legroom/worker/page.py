"""The workers' gauges on vLLM's metrics page. Import it after vLLM has imported `prometheus_client`, which chooses its
storage when it is imported."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import Gauge
from prometheus_client.core import GaugeMetricFamily

from legroom.worker.worker_memory import MEASURES, READ_INTERVAL_S, WorkerMemory

ReadWorkers = Callable[[float], tuple[WorkerMemory, ...]]
"""The figures that workers wrote within so many seconds: `TelemetryFolder.read`."""
MAX_AGE_S = 6 * READ_INTERVAL_S
"""Older figures are not exported: their worker hangs."""
LABELS = ("rank", "gpu")


class WorkerCollector:
    """Reads the workers' files at each scrape, in a server with one API server process."""

    def __init__(self, read: ReadWorkers) -> None:
        self._read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The metric families without samples, so that registration reads no files."""
        return (_gauge_family(name) for name in MEASURES)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The workers' gauges, one sample per rank and GPU; without workers that wrote nothing lately."""
        memory = self._read(MAX_AGE_S)
        for name in MEASURES:
            family = _gauge_family(name)
            for labels, value in _values_by_device(memory, name).items():
                family.add_metric(labels, value)
            yield family


def _gauge_family(name: str) -> GaugeMetricFamily:
    """The gauge of the measure `name` (a key of MEASURES), still without samples."""
    return GaugeMetricFamily(f"legroom_worker_{name}", MEASURES[name], labels=LABELS)


def _values_by_device(memory: tuple[WorkerMemory, ...], name: str) -> dict[tuple[str, str], float]:
    """(Rank, GPU) -> value of the measure `name`, summed over engines, which all count ranks from 0."""
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
        """Sets the gauges to this process's figures; returns True, as there is no folder that could be removed."""
        for name, gauge in self._gauges.items():
            for labels, value in _values_by_device(memory, name).items():
                gauge.labels(*labels).set(value)
        return True
