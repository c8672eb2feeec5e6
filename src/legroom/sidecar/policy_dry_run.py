"""`watch --rehearse`: the actions that the policy would have taken on a recording or a journal. An allowed restart
counts against the budgets, but later samples are replayed as recorded."""

import heapq
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.live.detectors import Watcher
from legroom.live.journal.journal import Journal, JournalPoint
from legroom.live.journal.journal_records import SQLITE_HEAD
from legroom.live.journal.sample_store import COUNTERS, GAUGES
from legroom.live.metrics.sample import EngineSample, Sample, ScrapeResult
from legroom.live.metrics.scrape_recording import replay
from legroom.live.remedies import remedies_for
from legroom.records import dataclass
from legroom.sidecar.action_policy import DAY_S, RESTARTS, GroupState
from legroom.sidecar.decisions import decision_about, first_accepted_change
from legroom.sidecar.open_incidents import IncidentKeeper, OpenIncident
from legroom.sidecar.watch_config import SidecarConfig


@dataclass(frozen=True)
class DryRunEvent:
    """An incident that opened or closed, a refusal, or an action."""

    time_s: float
    server: str
    kind: str
    what: str
    """`opened`, `closed`, `refused`, or the name of an action."""
    text: str


@dataclass(frozen=True)
class DryRun:
    """What a dry run would have done: its events by time, and how much was replayed."""

    events: tuple[DryRunEvent, ...]
    looks: int
    servers: int
    from_s: float | None
    until_s: float | None

    @property
    def actions(self) -> tuple[DryRunEvent, ...]:
        """The events at which the sidecar would have acted."""
        return tuple(event for event in self.events if event.what not in ("opened", "closed", "refused"))

    def to_json(self) -> dict[str, Any]:
        """The document of `watch --rehearse --json`."""
        span = {name: getattr(self, name) for name in ("looks", "servers", "from_s", "until_s")}
        return {**span, "actions": len(self.actions), "events": [asdict(event) for event in self.events]}


def dry_run(path: Path, config: SidecarConfig) -> DryRun:
    """What the sidecar would have done on a recording (`watch --record`) or a journal; LegroomError if unreadable."""
    play = _Player(config)
    try:
        with path.open("rb") as file:
            is_journal = file.read(len(SQLITE_HEAD)) == SQLITE_HEAD
    except OSError as error:
        raise LegroomError(f"{path} cannot be read: {error.strerror}", "a recording, or a journal.db") from error
    for result in _journal_samples(path) if is_journal else replay(path):
        play.take(result)
    return DryRun(tuple(play.events), play.looks, len(play.watchers), play.from_s, play.until_s)


class _Player:
    """Replays scrape results and collects what the sidecar would have done."""

    def __init__(self, config: SidecarConfig) -> None:
        self.config = config
        self.watchers: dict[str, Watcher] = {}
        self.groups = {server.name: server.group for server in config.servers}
        self.servers = {server.name: server for server in config.servers}
        self.keeper = IncidentKeeper()
        self.begun_s: dict[str, list[float]] = {}
        self.events: list[DryRunEvent] = []
        self.looks = 0
        self.from_s: float | None = None
        self.until_s: float | None = None

    def take(self, result: ScrapeResult) -> None:
        """Handles one recorded result as the sidecar would: updates the incidents and decides about the open ones."""
        self.looks += 1
        self.from_s = result.time_s if self.from_s is None else self.from_s
        self.until_s = result.time_s
        group = self.groups.setdefault(result.server, "default")
        server = self.servers.get(result.server)
        plan = server.plan if server is not None else None
        watcher = self.watchers.get(result.server)
        if watcher is None:
            watcher = self.watchers[result.server] = Watcher(result.server, self.config.thresholds, plan)
        changes = self.keeper.update(result.server, group, watcher.take(result))
        for incident in changes.opened:
            assert incident.finding is not None  # it was just found
            self._append_event(result, incident, "opened", f"{incident.title}: {incident.finding.reason}")
            given = server.answers.get(incident.kind) if server is not None else None
            incident.change = given or first_accepted_change(remedies_for(incident.finding, watcher.window, plan), plan)
        for incident in changes.closed:
            self._append_event(result, incident, "closed", f"{incident.title}: over")
        for incident in self.keeper.of_server(result.server):
            self._record_decision(result, incident, watcher)

    def _record_decision(self, result: ScrapeResult, incident: OpenIncident, watcher: Watcher) -> None:
        """Appends an event, once, with what the sidecar would do about the incident or why it would do nothing."""
        finding, settings = incident.finding, self.config.group(incident.group)
        if finding is None or not finding.is_seen_now or incident.last_action:
            return
        server, group = self.servers.get(incident.server), self._group_state(incident.group, result.time_s)
        decision = decision_about(incident, watcher, server, settings, group)
        if decision.action is None:
            if decision.dedupe_key != incident.last_refusal:
                incident.last_refusal = decision.dedupe_key
                self._append_event(result, incident, "refused", f"would not act: {decision.reason}")
            return
        if decision.action in RESTARTS or decision.action == "scale":
            self.begun_s.setdefault(incident.group, []).append(result.time_s)
        incident.last_action = decision.action
        change = f" with {incident.change}" if decision.action == "restart-with-flags" else ""
        self._append_event(result, incident, decision.action, f"would {decision.action}{change}: {decision.reason}")

    def _group_state(self, name: str, now_s: float) -> GroupState:
        """The group's state at `now_s`: servers, unhealthy ones, and ages of the simulated actions so far."""
        members = [server for server, group in self.groups.items() if group == name]
        watched = [self.watchers[server] for server in members if server in self.watchers]
        unhealthy = sum(any(finding.severity == "critical" for finding in each.findings) for each in watched)
        ages_s = [now_s - begun_s for begun_s in self.begun_s.get(name, []) if now_s - begun_s < DAY_S]
        # An action is assumed to take a minute.
        busy = "an action would be under way" if any(age_s < 60.0 for age_s in ages_s) else None
        return GroupState(name, len(members), unhealthy, ages_s, busy)

    def _append_event(self, result: ScrapeResult, incident: OpenIncident, kind: str, text: str) -> None:
        """Appends an event of the incident at the result's time; `kind`: opened, closed, refused or an action."""
        self.events.append(DryRunEvent(result.time_s, incident.server, incident.kind, kind, text))


def _journal_samples(path: Path) -> Iterator[ScrapeResult]:
    """The samples of all servers in a journal, by time; those older than a day are roll-ups."""
    with Journal.open(path) as journal:
        points = {server: journal.samples(server, 0.0, 1e11, max_points=10**12) for server in journal.servers()}
        series = [[_sample_of_point(server, point) for point in listed] for server, listed in points.items()]
        yield from heapq.merge(*series, key=lambda sample: sample.time_s)


def _sample_of_point(server: str, point: JournalPoint) -> Sample:
    """A journal point as a sample of a single engine, timed at the end of its span."""
    values: dict[str, float | None] = {name: getattr(point, name) for name in (*GAUGES, *COUNTERS)}
    blocks, memory_bytes = point.num_blocks, point.memory_used_bytes
    engine = EngineSample("", "0", num_blocks=None if blocks is None else round(blocks), **values)  # type: ignore[arg-type]
    used = None if memory_bytes is None else round(memory_bytes)
    end_s, started_s = point.time_s + point.span_s, point.process_start_s
    return Sample(end_s, server, (engine,), process_start_s=started_s, memory_used_bytes=used)
