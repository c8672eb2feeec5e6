"""The sidecar's own metrics."""

import contextlib
from collections.abc import Iterable
from typing import Any

from legroom.live.journal.journal_buffer import JournalThread
from legroom.live.metrics.sample import Sample, ScrapeResult
from legroom.sidecar.open_incidents import OpenIncident


class SidecarMetrics:
    def __init__(self) -> None:
        import prometheus_client  # slow to import
        from prometheus_client import CollectorRegistry, Counter, Gauge

        untyped: Any = prometheus_client
        untyped.disable_created_metrics()
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"legroom_{name}", about, labels, registry=registry)

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"legroom_{name}", about, labels, registry=registry)

        server = ("server", "group")
        self.scrapes = counter("looks", "Scrapes of servers, by result.", ("result",))
        self.up = gauge("server_up", "Whether a server answered the last scrape.", server)
        self.healthy = gauge("server_healthy", "Whether nothing critical is found at a server.", server)
        self.kv_use = gauge("server_kv_use", "Share of a server's KV pool in use.", server)
        self.full_in = gauge("server_pool_full_seconds", "Forecast: seconds until the pool is full.", server)
        self.open = gauge("incidents_open", "Incidents that last.", ("kind", "severity"))
        self.opened = counter("incidents", "Incidents opened.", ("kind",))
        self.actions = counter("actions", "Actions ended, by how.", ("name", "outcome"))
        self.refusals = counter("refusals", "Times that the policy refused to act.")
        self.notified = counter("notifications", "Messages sent, by whether they were taken.", ("result",))
        self.journal_ok = gauge("journal_writable", "Whether the journal could be written last.")
        self.journal_waiting = gauge("journal_waiting", "Entries that wait to be written.")
        self.journal_lost = gauge("journal_lost", "Entries given up since the start.")
        self.acting = gauge("acting", "Whether an action is turned on.", ("name", "group"))

    def count_scrape(self, result: ScrapeResult, group: str, is_healthy: bool) -> None:
        """Counts the result by kind, and sets the server's up, healthy and KV use gauges."""
        self.scrapes.labels("sample" if isinstance(result, Sample) else result.kind).inc()
        self.up.labels(result.server, group).set(isinstance(result, Sample))
        self.healthy.labels(result.server, group).set(is_healthy)
        if isinstance(result, Sample) and result.kv_use is not None:
            self.kv_use.labels(result.server, group).set(result.kv_use)

    def remove_server(self, server: str, group: str) -> None:
        """Removes the server's own gauges (up, healthy, KV use, forecast), which would keep their last values."""
        for gauge in (self.up, self.healthy, self.kv_use, self.full_in):
            with contextlib.suppress(KeyError):
                gauge.remove(server, group)

    def page_and_type(self, open_incidents: Iterable[OpenIncident], journal: JournalThread) -> tuple[bytes, str]:
        """(all series in Prometheus' text format, its content type); incidents and journal are those of now."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        self.open.clear()
        for incident in open_incidents:
            self.open.labels(incident.kind, incident.severity).inc()
        self.journal_ok.set(journal.buffer.problem is None)
        self.journal_waiting.set(journal.buffer.waiting)
        self.journal_lost.set(journal.buffer.lost)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
