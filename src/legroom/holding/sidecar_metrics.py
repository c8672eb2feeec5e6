"""The sidecar's own figures, in a registry of its own."""

from __future__ import annotations

import contextlib
from typing import Any

from legroom.holding.policy import ACTION_NAMES
from legroom.live.sample import Look, Sample


class SidecarMetrics:
    """`legroom_*`, as a Prometheus reads them."""

    def __init__(self) -> None:
        import prometheus_client  # noqa: PLC0415  slow to import
        from prometheus_client import CollectorRegistry, Counter, Gauge  # noqa: PLC0415

        untyped: Any = prometheus_client
        untyped.disable_created_metrics()

        self.registry = CollectorRegistry()
        held: dict[str, Any] = {"registry": self.registry}
        self.looks = Counter("legroom_looks", "Looks at servers, by what they brought.", ["result"], **held)
        self.up = Gauge("legroom_server_up", "Whether a server answered the last look.", ["server", "group"], **held)
        self.healthy = Gauge(
            "legroom_server_healthy", "Whether nothing critical is found at a server.", ["server", "group"], **held
        )
        self.kv_use = Gauge("legroom_server_kv_use", "Share of a server's KV pool in use.", ["server", "group"], **held)
        self.full_in = Gauge(
            "legroom_server_pool_full_seconds", "Forecast: seconds until the pool is full.", ["server", "group"], **held
        )
        self.open = Gauge("legroom_incidents_open", "Incidents that last.", ["kind", "severity"], **held)
        self.opened = Counter("legroom_incidents", "Incidents opened.", ["kind"], **held)
        self.actions = Counter("legroom_actions", "Actions ended, by how.", ["name", "outcome"], **held)
        self.refusals = Counter("legroom_refusals", "Times that the policy refused to act.", **held)
        self.notified = Counter(
            "legroom_notifications", "Messages sent, by whether they were taken.", ["result"], **held
        )
        self.journal_ok = Gauge("legroom_journal_writable", "Whether the journal could be written last.", **held)
        self.journal_waiting = Gauge("legroom_journal_waiting", "Entries that wait to be written.", **held)
        self.journal_lost = Gauge("legroom_journal_lost", "Entries given up since the start.", **held)
        self.acting = Gauge("legroom_acting", "Whether an action is turned on.", ["name", "group"], **held)

    def saw(self, seen: Look, group: str, is_healthy: bool) -> None:
        """One look at one server."""
        self.looks.labels("sample" if isinstance(seen, Sample) else seen.kind).inc()
        self.up.labels(seen.server, group).set(isinstance(seen, Sample))
        self.healthy.labels(seen.server, group).set(is_healthy)
        if isinstance(seen, Sample) and seen.kv_use is not None:
            self.kv_use.labels(seen.server, group).set(seen.kv_use)

    def forget(self, server: str, group: str) -> None:
        """A server that is no longer watched has no figures."""
        for gauge in (self.up, self.healthy, self.kv_use, self.full_in):
            with contextlib.suppress(KeyError):
                gauge.remove(server, group)

    def say_acting(self, group: str, act: frozenset[str]) -> None:
        """What is turned on, once."""
        for name in ACTION_NAMES:
            self.acting.labels(name, group).set(name in act)

    def text(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415

        return generate_latest(self.registry), CONTENT_TYPE_LATEST
