"""The guard's series on the metrics page; counts are plain attributes, because every request changes some."""

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from legroom.guard.request.refusals import REASONS

WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CAPPED = ("output", "default_output", "logprobs", "prompt_logprobs")

_OWN_LINE = re.compile(rb"^(?:# (?:HELP|TYPE) )?legroom_guard_(?!stopped_engines|start_requested).*\n?", re.MULTILINE)
"""Series that an outer guard replaces; only the one inside vLLM knows its process and engines."""
_OPEN_METRICS_END = b"# EOF"


class GuardMetrics:
    """Counters of one guard; gauges are passed in when the page is written."""

    def __init__(self) -> None:
        self.admitted = self.passed = 0
        self.rejected: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.left_queue = 0
        self._wait_sum_s = 0.0
        self._waits = [0] * (len(WAIT_BUCKETS_S) + 1)

    def observe_wait(self, seconds: float) -> None:
        """Count an admitted request's wait in its bucket."""
        self._wait_sum_s += seconds
        self._waits[bisect_left(WAIT_BUCKETS_S, seconds)] += 1

    def page(self, values: Mapping[str, tuple[str, float]], labels: Mapping[str, str], open_metrics: bool) -> bytes:
        """The page with `labels` on each series; `values`: name -> (help, value), counters if named `_total`."""
        from prometheus_client import CollectorRegistry, exposition
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
        from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

        names, own = list(labels), list(labels.values())

        def counter(name: str, about: str, counts: Mapping[str, float] | float, label: str = "") -> Metric:
            """The counter family `legroom_guard_{name}`; `counts`: one value, or one by value of `label`."""
            family = CounterMetricFamily(f"legroom_guard_{name}", about, labels=[*names, label] if label else names)
            for key, count in counts.items() if isinstance(counts, Mapping) else (("", counts),):
                family.add_metric([*own, key] if label else own, count)
            return family

        def collect() -> Iterator[Metric]:
            """The metric families of one scrape."""
            yield counter("admitted", "Requests admitted.", self.admitted)
            about = "Requests on paths that are not guarded, or without the key that vLLM asks for."
            yield counter("passed", about, self.passed)
            refused = {reason: self.rejected[reason] for reason in REASONS}
            yield counter("rejected", "Requests refused, by reason.", refused, "reason")
            about = "Values written into requests, by what was capped."
            yield counter("capped", about, {what: self.capped[what] for what in CAPPED}, "what")
            yield counter("left_queue", "Clients that went away while they waited.", self.left_queue)
            for name, (about, value) in values.items():
                if name.endswith("_total"):
                    yield counter(name, about, value)
                    continue
                gauge = GaugeMetricFamily(f"legroom_guard_{name}", about, labels=names)
                gauge.add_metric(own, value)
                yield gauge
            about = "Time that admitted requests waited."
            waits = HistogramMetricFamily("legroom_guard_wait_seconds", about, labels=names)
            edges = (*map(str, WAIT_BUCKETS_S), "+Inf")
            buckets = list(zip(edges, itertools.accumulate(self._waits), strict=True))
            waits.add_metric(own, buckets, self._wait_sum_s)
            yield waits

        registry = CollectorRegistry()
        registry.collect = collect  # type: ignore[method-assign]
        generate = generate_open_metrics if open_metrics else exposition.generate_latest
        page: bytes = generate(registry)
        return page.removesuffix(_OPEN_METRICS_END + b"\n")


def append_page(server_page: bytes, own_page: bytes) -> bytes:
    """The server's metrics page with `own_page` at its end (before OpenMetrics' `# EOF`). Series of a guard inside the
    server are removed where this guard has them too, because no series may occur twice."""
    if b"legroom_guard_" in server_page:
        server_page = _OWN_LINE.sub(b"", server_page)
    stripped = server_page.rstrip()
    if stripped.endswith(_OPEN_METRICS_END):
        return stripped.removesuffix(_OPEN_METRICS_END) + own_page + _OPEN_METRICS_END + b"\n"
    return server_page + (b"" if not server_page or server_page.endswith(b"\n") else b"\n") + own_page
