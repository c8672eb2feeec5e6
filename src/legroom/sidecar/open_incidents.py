"""From findings to incidents: opened once, kept while they last, closed when they are over. Also across a restart."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legroom.actions.platform import FlagChange
from legroom.live.detectors import DetectorFinding
from legroom.live.journal.journal import Incident, Journal
from legroom.records import dataclass as record

BY = "sidecar"
OVER, UNWATCHED, ELSEWHERE = "over", "no longer watched", "goes on as another incident"
_ADOPTED_SCRAPES = 12  # a finding needs its time to be found again: a minute at the usual interval


@dataclass
class OpenIncident:
    """An incident while it lasts. `key` names it in the journal, also before it could be written there."""

    key: str
    server: str
    group: str
    kind: str
    title: str
    opened_s: float
    severity: str
    finding: DetectorFinding | None
    """None for one that an earlier legroom opened and that was not seen again yet."""
    reason: str = ""
    """Why it was opened, for one that was not seen again yet."""
    number: int | None = None
    """Its own in the journal, as soon as it is there."""
    acknowledged: bool = False
    last_refusal: tuple[str | None, str] = (None, "")
    """The kind of the last reason for not acting, so that it is noted once."""
    ask_again_s: float = 0.0
    """On the monotonic clock: when deciding again can have another answer."""
    scrapes_without: int = 0
    lasts_until_s: float = 0.0
    """On the monotonic clock: before it, an adopted one that is not found again may yet be."""
    last_action: str = ""
    """The last action for it and how that ended."""
    remedies_asked: bool = False
    """Whether its remedies are being computed, or were."""
    remedies_known: bool = False
    """Whether `change` is known: until then nothing is decided."""
    change: FlagChange | None = None
    """Flags that cure it."""

    def detail(self) -> dict[str, Any]:
        """What the journal keeps of its beginning."""
        finding = self.finding.to_json() if self.finding is not None else {}
        return {"by": BY, "group": self.group, "severity": self.severity, "finding": finding}


@record(frozen=True)
class IncidentUpdate:
    opened: tuple[OpenIncident, ...] = ()
    closed: tuple[OpenIncident, ...] = ()
    worse: tuple[OpenIncident, ...] = ()


class IncidentKeeper:
    """Every open incident by server and kind."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], OpenIncident] = {}
        self._kinds: dict[str, None] = {}
        """Every kind that was ever open: few, where servers may be thousands."""

    def all(self) -> tuple[OpenIncident, ...]:
        """Those that are open, the oldest first."""
        return tuple(sorted(self._open.values(), key=lambda incident: incident.opened_s))

    def of(self, server: str) -> tuple[OpenIncident, ...]:
        possible = (self._open.get((server, kind)) for kind in self._kinds)
        return tuple(incident for incident in possible if incident is not None)

    def take_over(
        self, incidents: Iterable[Incident], group_of: Mapping[str, str], patience_s: Mapping[str, float]
    ) -> frozenset[str]:
        """Goes on with what an earlier legroom left open for servers that may still be watched.

        `patience_s` says by kind how long a detector must watch before its silence means anything. The keys of all
        that are open are the answer.
        """
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
                    str(_last_noted(incident, "severity", "warning")),
                    None,
                    reason=_reason(incident),
                    number=incident.id,
                    acknowledged=bool(_last_noted(incident, "acknowledged", False)),
                    lasts_until_s=now_s + patience_s.get(incident.kind, 0.0),
                )
        return frozenset(incident.key for incident in self._open.values())

    def update(self, server: str, group: str, findings: Sequence[DetectorFinding]) -> IncidentUpdate:
        """Takes what is wrong with a server now. Mere information is no incident."""
        now = {finding.kind: finding for finding in findings if finding.severity != "info"}
        opened, closed, worse = [], [], []
        for kind, finding in now.items():
            incident = self._open.get((server, kind))
            if incident is None:
                incident = self._new(server, group, finding)
                self._kinds[kind] = None
                self._open[server, kind] = incident
                opened.append(incident)
            elif incident.severity != "critical" and finding.severity == "critical":
                incident.severity = finding.severity  # and stays so: what swings is reported once
                worse.append(incident)
            incident.finding, incident.scrapes_without = finding, 0
        for incident in self.of(server):
            if incident.kind not in now:
                incident.scrapes_without += 1
                if incident.finding is not None or _is_over(incident):
                    del self._open[server, incident.kind]
                    closed.append(incident)
        return IncidentUpdate(tuple(opened), tuple(closed), tuple(worse))

    def forget(self, server: str) -> tuple[OpenIncident, ...]:
        """A server that is no longer watched: its incidents end."""
        server_removed = self.of(server)
        for incident in server_removed:
            del self._open[server, incident.kind]
        return server_removed

    @staticmethod
    def _new(server: str, group: str, finding: DetectorFinding) -> OpenIncident:
        key = f"{server}|{finding.kind}|{finding.time_s:.3f}"
        return OpenIncident(key, server, group, finding.kind, finding.title, finding.since_s, finding.severity, finding)


def _is_over(adopted: OpenIncident) -> bool:
    return adopted.scrapes_without >= _ADOPTED_SCRAPES and time.monotonic() >= adopted.lasts_until_s


def _reason(incident: Incident) -> str:
    finding = incident.detail.get("finding")
    return str(finding.get("reason", "")) if isinstance(finding, Mapping) else ""


def _last_noted(incident: Incident, name: str, otherwise: object) -> object:
    """What the last note with this detail says, else what the incident began with."""
    noted = [note.detail[name] for note in incident.notes if name in note.detail]
    return noted[-1] if noted else incident.detail.get(name, otherwise)


def left_open(journal: Journal) -> tuple[Incident, ...]:
    """What sidecars opened and did not close, with its notes."""
    ours = [incident.id for incident in journal.incidents(open_only=True) if incident.detail.get("by") == BY]
    return tuple(incident for number in ours if (incident := journal.incident(number)) is not None)


def close_rest(journal: Journal, left: Iterable[Incident], kept: Collection[str], watched: Collection[str]) -> None:
    """Ends what is not gone on with: nobody scrapes at the server any more, or it was found anew meanwhile."""
    for incident in left:
        if incident.key not in kept:
            journal.close_incident(incident.id, ELSEWHERE if incident.server in watched else UNWATCHED)
