"""From findings to incidents: opened once, kept while they last, closed when they are over. Also across a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legroom.actions.platform import FlagChange
from legroom.live.detectors import Finding
from legroom.live.journal import Incident, Journal
from legroom.records import dataclass as record

UNWATCHED = "no longer watched"
_ADOPTED_LOOKS = 12  # a finding needs its time to be found again: a minute at the usual interval


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
    finding: Finding | None
    """None for one that an earlier legroom opened and that was not seen again yet."""
    acknowledged: bool = False
    said: str = ""
    """The last reason for not acting, so that it is noted once."""
    ask_again_s: float = 0.0
    """On the monotonic clock: when deciding again can have another answer."""
    looks_without: int = 0
    acted: str = ""
    """The last action for it and how that ended."""
    asked: bool = False
    """Whether its answers are being computed, or were."""
    answered: bool = False
    """Whether `change` is known: until then nothing is decided."""
    change: FlagChange | None = None
    """Flags that cure it."""

    def detail(self) -> dict[str, Any]:
        """What the journal keeps of its beginning."""
        found = self.finding.to_json() if self.finding is not None else {}
        return {"by": "sidecar", "group": self.group, "severity": self.severity, "finding": found}


@record(frozen=True)
class Changes:
    """What a look changed."""

    opened: tuple[OpenIncident, ...] = ()
    closed: tuple[OpenIncident, ...] = ()
    worse: tuple[OpenIncident, ...] = ()


class IncidentKeeper:
    """Every open incident by server and kind."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], OpenIncident] = {}

    def all(self) -> tuple[OpenIncident, ...]:
        """Those that are open, the oldest first."""
        return tuple(sorted(self._open.values(), key=lambda one: one.opened_s))

    def of(self, server: str) -> tuple[OpenIncident, ...]:
        """Those of one server."""
        return tuple(one for one in self._open.values() if one.server == server)

    def adopt(self, incidents: Iterable[Incident], group_of: Mapping[str, str]) -> None:
        """Goes on with what an earlier legroom left open for servers that are still watched."""
        for incident in incidents:
            place = (incident.server, incident.kind)
            if incident.server in group_of and place not in self._open and incident.key is not None:
                self._open[place] = OpenIncident(
                    incident.key, incident.server, group_of[incident.server], incident.kind, incident.title,
                    incident.opened_s, str(incident.detail.get("severity", "warning")), None,
                )  # fmt: skip

    def update(self, server: str, group: str, findings: Sequence[Finding]) -> Changes:
        """Takes what is wrong with a server now. Mere information is no incident."""
        now = {one.kind: one for one in findings if one.severity != "info"}
        opened, closed, worse = [], [], []
        for kind, finding in now.items():
            held = self._open.get((server, kind))
            if held is None:
                held = self._new(server, group, finding)
                self._open[server, kind] = held
                opened.append(held)
            elif held.finding is not None and held.severity != "critical" and finding.severity == "critical":
                worse.append(held)
            held.finding, held.severity, held.looks_without = finding, finding.severity, 0
        for held in self.of(server):
            if held.kind not in now:
                held.looks_without += 1
                if held.finding is not None or held.looks_without >= _ADOPTED_LOOKS:
                    del self._open[server, held.kind]
                    closed.append(held)
        return Changes(tuple(opened), tuple(closed), tuple(worse))

    def forget(self, server: str) -> tuple[OpenIncident, ...]:
        """A server that is no longer watched: its incidents end."""
        gone = self.of(server)
        for one in gone:
            del self._open[server, one.kind]
        return gone

    @staticmethod
    def _new(server: str, group: str, finding: Finding) -> OpenIncident:
        key = f"{server}|{finding.kind}|{finding.time_s:.3f}"
        return OpenIncident(key, server, group, finding.kind, finding.title, finding.since_s, finding.severity, finding)


def close_unwatched(journal: Journal, incidents: Iterable[Incident], watched: Iterable[str]) -> None:
    """Ends what an earlier legroom left open for servers that nobody looks at any more."""
    servers = set(watched)
    for incident in incidents:
        if incident.server not in servers:
            journal.close_incident(incident.id, UNWATCHED)
