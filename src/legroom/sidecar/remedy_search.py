"""What would cure an incident, computed beside the looking: a plan and its levers take a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from legroom.live.detectors import DetectorFinding
from legroom.live.metrics.window import Window
from legroom.live.remedies import remedies_for
from legroom.planning.plan_document import PlanDocument
from legroom.sidecar.decisions import change_of
from legroom.sidecar.incident_reporting import IncidentReporter
from legroom.sidecar.open_incidents import OpenIncident
from legroom.sidecar.watch_config import ServerConfig


class RemedySearch:
    """One search an incident, begun as soon as it is seen."""

    def __init__(self, reporter: IncidentReporter) -> None:
        self._reporter = reporter
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        """Those under way."""
        return tuple(self._tasks)

    def begin(self, incident: OpenIncident, server: ServerConfig | None, window: Window) -> None:
        """Without a plan no flags come of it, so nothing waits for them."""
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
