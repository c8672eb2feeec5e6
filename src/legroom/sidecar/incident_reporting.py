"""Reports incidents to the log, the journal, the webhooks and the metrics, and computes their remedies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from legroom.live.detectors import DetectorFinding
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_buffer import JournalThread
from legroom.live.metrics.window import Window
from legroom.live.remedies import remedies_for
from legroom.planning.plan_document import PlanDocument
from legroom.sidecar.decisions import change_of
from legroom.sidecar.notifier import ActionReport, Notifier
from legroom.sidecar.open_incidents import OVER, OpenIncident
from legroom.sidecar.sidecar_http import SidecarMetrics
from legroom.sidecar.watch_config import ServerConfig


class IncidentReporter:
    """Reports incidents without blocking: journal and notifier have queues."""

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


class RemedySearch:
    """Computes the remedies of each incident in a thread: planning takes seconds."""

    def __init__(self, reporter: IncidentReporter) -> None:
        self._reporter = reporter
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        return tuple(self._tasks)

    def begin(self, incident: OpenIncident, server: ServerConfig | None, window: Window) -> None:
        """Starts the computation once per incident. Without a plan no flags result, so decisions do not wait for it."""
        if incident.remedies_asked or incident.finding is None:
            return
        incident.remedies_asked = True
        plan = server.plan if server is not None else None
        incident.change = server.answers.get(incident.kind) if server is not None else None
        incident.remedies_known = plan is None or incident.change is not None
        work = self._find(incident, incident.finding, window.snapshot(), plan)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(
        self, incident: OpenIncident, finding: DetectorFinding, window: Window, plan: PlanDocument | None
    ) -> None:
        given = incident.change
        try:
            remedies = await asyncio.to_thread(remedies_for, finding, window, plan)
            incident.change = given or change_of(remedies, plan)
        finally:
            incident.remedies_known = True
        texts = "; ".join(remedy.why for remedy in remedies)
        detail = {"answers": [remedy.to_json() for remedy in remedies], "change": str(given) if given else None}
        self._reporter.note(incident, f"what helps: {texts}", detail)
