"""Findings become incidents, which stay open across restarts of the sidecar."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from legroom.actions.platform import FlagChange
from legroom.live.detectors import DetectorFinding
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import Incident
from legroom.records import dataclass as record

BY = "sidecar"
OVER, UNWATCHED, ELSEWHERE = "over", "no longer watched", "goes on as another incident"


@dataclass
class OpenIncident:
    """An open incident. `key` identifies it in the journal, also before it is written there."""

    key: str
    server: str
    group: str
    kind: str
    title: str
    opened_s: float
    severity: str
    finding: DetectorFinding | None
    """None for an incident of an earlier process that was not detected again yet."""
    reason: str = ""
    """Why it was opened, while `finding` is None."""
    number: int | None = None
    """Its id in the journal, once written."""
    acknowledged: bool = False
    last_refusal: tuple[str | None, str] = (None, "")
    """The dedupe key of the last refusal, so that it is noted once."""
    ask_again_s: float = 0.0
    """Monotonic time of the next decision."""
    scrapes_without: int = 0
    lasts_until_s: float = 0.0
    """Monotonic time until which an incident of an earlier process may still be detected again."""
    last_action: str = ""
    """The last action and its outcome."""
    remedies_asked: bool = False
    """Whether the computation of remedies was started."""
    remedies_known: bool = False
    """Whether `change` is final; no decision is made before."""
    change: FlagChange | None = None
    """Flags to restart with."""
    meanwhile: str = ""
    """What a `legroom run` is doing to the server."""
    told: dict[str, str] = field(default_factory=dict)
    """Webhook -> the severity it was told last."""

    def detail(self) -> dict[str, Any]:
        """The incident's `detail` object in the journal: finding, severity, webhooks that were told."""
        finding = self.finding.to_json() if self.finding is not None else {}
        told = {"told": dict(self.told)} if self.told else {}
        return {"by": BY, "group": self.group, "severity": self.severity, "finding": finding, **told}


@record(frozen=True)
class IncidentUpdate:
    opened: tuple[OpenIncident, ...] = ()
    closed: tuple[OpenIncident, ...] = ()
    worse: tuple[OpenIncident, ...] = ()


class IncidentKeeper:
    """All open incidents by server and kind."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], OpenIncident] = {}
        self._kinds: dict[str, None] = {}
        """Every kind that was ever open, to find a server's incidents without a scan."""

    def all(self) -> tuple[OpenIncident, ...]:
        """Open incidents, oldest first."""
        return tuple(sorted(self._open.values(), key=lambda incident: incident.opened_s))

    def of_server(self, server: str) -> tuple[OpenIncident, ...]:
        """The open incidents of one server, in the order in which their kinds first occurred anywhere."""
        possible = (self._open.get((server, kind)) for kind in self._kinds)
        return tuple(incident for incident in possible if incident is not None)

    def take_over(
        self, incidents: Iterable[Incident], group_of: Mapping[str, str], patience_s: Mapping[str, float]
    ) -> frozenset[str]:
        """Opens an earlier process's incidents of watched servers (in `group_of`) again, for at least `patience_s` (by
        kind) so that they can be detected again. Returns the keys of all open incidents."""
        now_s = time.monotonic()
        for incident in incidents:
            place = (incident.server, incident.kind)
            if incident.server in group_of and place not in self._open and incident.key is not None:
                self._kinds[incident.kind] = None
                self._open[place] = OpenIncident(
                    incident.key,
                    incident.server,
                    group_of[incident.server],
                    incident.kind,
                    incident.title,
                    incident.opened_s,
                    str(_last_noted_detail(incident, "severity", "warning")),
                    None,
                    reason=str((incident.detail.get("finding") or {}).get("reason", "")),
                    number=incident.id,
                    acknowledged=bool(_last_noted_detail(incident, "acknowledged", False)),
                    lasts_until_s=now_s + patience_s.get(incident.kind, 0.0),
                    told=dict(_last_noted_detail(incident, "told", {})),
                )
        return frozenset(incident.key for incident in self._open.values())

    def update(self, server: str, group: str, findings: Sequence[DetectorFinding]) -> IncidentUpdate:
        """Opens, worsens and closes a server's incidents by its current findings above `info`; returns the changes."""
        now = {finding.kind: finding for finding in findings if finding.severity != "info"}
        opened, closed, worse = [], [], []
        for kind, finding in now.items():
            incident = self._open.get((server, kind))
            if incident is None:
                key = f"{server}|{kind}|{finding.time_s:.3f}"
                opened_s, severity = finding.since_s, finding.severity
                incident = OpenIncident(key, server, group, kind, finding.title, opened_s, severity, finding)
                self._kinds[kind] = None
                self._open[server, kind] = incident
                opened.append(incident)
            elif incident.severity != "critical" and finding.severity == "critical":
                incident.severity = finding.severity  # never lowered again, so that it is reported once
                worse.append(incident)
            incident.finding, incident.scrapes_without = finding, 0
        for incident in self.of_server(server):
            if incident.kind not in now:
                incident.scrapes_without += 1
                # Twelve scrapes are a minute at the default interval.
                has_waited = incident.scrapes_without >= 12 and time.monotonic() >= incident.lasts_until_s
                if incident.finding is not None or has_waited:
                    del self._open[server, incident.kind]
                    closed.append(incident)
        return IncidentUpdate(tuple(opened), tuple(closed), tuple(worse))

    def forget(self, server: str) -> tuple[OpenIncident, ...]:
        """Drops and returns the incidents of a server that is no longer watched."""
        removed = self.of_server(server)
        for incident in removed:
            del self._open[server, incident.kind]
        return removed


def _last_noted_detail(incident: Incident, key: str, default: Any) -> Any:
    """The value of `key` in the last of the incident's notes that has it, else in its detail, else `default`."""
    noted = [note.detail[key] for note in incident.notes if key in note.detail]
    return noted[-1] if noted else incident.detail.get(key, default)


def left_open(journal: Journal) -> tuple[Incident, ...]:
    """The journal's open incidents that a sidecar opened, with their notes."""
    ours = [incident.id for incident in journal.incidents(open_only=True) if incident.detail.get("by") == BY]
    return tuple(incident for number in ours if (incident := journal.incident(number)) is not None)


def close_leftovers(
    journal: Journal, incidents: Iterable[Incident], kept_keys: Collection[str], watched_servers: Collection[str]
) -> None:
    """Closes incidents that an earlier sidecar left open, except `kept_keys`, which were taken over; the outcome says
    whether the server is still watched."""
    for incident in incidents:
        if incident.key not in kept_keys:
            journal.close_incident(incident.id, ELSEWHERE if incident.server in watched_servers else UNWATCHED)
