"""Everything that is said of an incident: on stderr, in the journal, to the webhooks and in the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_buffer import JournalThread
from legroom.sidecar.notifier import ActionReport, Notifier
from legroom.sidecar.open_incidents import OVER, OpenIncident
from legroom.sidecar.sidecar_http import SidecarMetrics


class IncidentReporter:
    """Never waits: the journal and the notifier each have their own queue."""

    def __init__(
        self, journal: JournalThread, notifier: Notifier, metrics: SidecarMetrics, log: Callable[[str], None]
    ) -> None:
        self._journal, self._notifier, self._metrics, self._log = journal, notifier, metrics, log

    def opened(self, incident: OpenIncident) -> None:
        finding = incident.finding
        reason = finding.reason if finding is not None else ""
        self._log(f"{incident.server}: {incident.title}: {reason}")
        self._metrics.opened.labels(incident.kind).inc()
        detail = incident.detail()

        def open_incident(journal: Journal) -> None:
            incident.number = journal.open_incident(
                incident.server, incident.kind, incident.title, detail, incident.opened_s, incident.key
            )

        self._journal.write(open_incident)
        self.note(incident, reason)
        self._notifier.notify(incident)

    def became_critical(self, incident: OpenIncident) -> None:
        self.note(incident, "it has become critical", {"severity": incident.severity})
        self._notifier.notify(incident)

    def closed(self, incident: OpenIncident, how: str = OVER) -> None:
        unseen = incident.finding is None and how == OVER
        outcome = f"{how} while legroom was not watching" if unseen else how
        outcome += f", after {incident.last_action}" if incident.last_action else ""
        self._log(f"{incident.server}: {incident.title}: {outcome}")
        self._journal.write(lambda journal: journal.close_incident(journal.incident_id(incident.key) or 0, outcome))
        self._notifier.notify(incident, outcome, time.time())

    def note(self, incident: OpenIncident, text: str, detail: Mapping[str, Any] | None = None) -> None:
        self._journal.write(lambda journal: journal.note(journal.incident_id(incident.key) or 0, text, detail))

    def acted(self, report: ActionReport) -> None:
        incident = report.incident
        self._log(f"{incident.server}: {report.text}" if incident is not None else report.text)
        if report.name == "refusal":
            self._metrics.refusals.inc()
        if report.outcome is not None:
            self._metrics.actions.labels(report.name, report.outcome).inc()
            if incident is not None:
                incident.last_action = f"{report.name} ({report.outcome})"
        if incident is not None:
            self.note(incident, report.text)
            if report.name != "refusal":
                self._notifier.notify(incident, report.text)
