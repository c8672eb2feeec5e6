"""`legroom watch` without --daemon: scrape results in, views out, incidents into the journal. It never acts."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.detectors import Watcher
from legroom.live.detectors.plan_drift import ComparedFigure, compare_with_plan
from legroom.live.gpu_memory import LocalServers
from legroom.live.journal.journal import Journal
from legroom.live.journal.journal_records import Incident, JournalUnavailable
from legroom.live.metrics.endpoint import Endpoint
from legroom.live.metrics.kubernetes_source import discovered_endpoints, pods_api
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.live.run_record import failed_under_way, with_start_reason
from legroom.live.server_view import ServerView, server_view
from legroom.live.thresholds import DEFAULT, Thresholds
from legroom.planning.plan_document import PlanDocument
from legroom.records import dataclass
from legroom.sidecar.open_incidents import OVER, UNWATCHED, IncidentKeeper, OpenIncident

if TYPE_CHECKING:
    from legroom.live.metrics.scrape_recording import Recorder
    from legroom.sidecar.watch_config import PrometheusConfig, SidecarConfig

MAX_HISTORY = 720
"""An hour at the default interval."""
_WITH_LONG_HISTORY, _SHORT_HISTORY = 100, 24
"""Only the first hundred servers keep a long history: thousands would be most of the process's memory."""
ONCE_SCRAPES = 3
"""Rates need two scrapes; a third confirms them."""
_IMMEDIATE_KINDS = frozenset({"pool_pressure", "preemption_thrash", "queue_backlog", "refused_load", "plan_drift"})
"""Detectors whose condition is meaningful in a single scrape."""
_SCRAPES_AGO_S = (60.0, 30.0, 15.0)
"""Past evaluation times that yield a second scrape at Prometheus' usual intervals of 15 to 60 s."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    time_s: float
    kv_use: float | None = None
    running: float = 0.0
    waiting: float = 0.0
    generation_tokens_per_s: float = 0.0
    preemptions_per_s: float = 0.0


@dataclass(frozen=True)
class IncidentChange:
    incident: OpenIncident
    is_over: bool
    time_s: float
    id: int | None = None
    """Its journal id."""


class WatchSession:
    """The state of `legroom watch`: scrape results in; views, history and incidents out."""

    def __init__(
        self,
        levels: Thresholds = DEFAULT,
        plans: Mapping[str, PlanDocument] | None = None,
        journal: Journal | None = None,
        recorder: Recorder | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.levels = levels
        self.views: dict[str, ServerView] = {}
        self.history: dict[str, deque[HistoryPoint]] = {}
        self.changes: deque[IncidentChange] = deque(maxlen=200)
        self.scrapes = 0
        self._plans, self._journal, self._recorder = dict(plans or {}), journal, recorder
        self.log = log or (lambda text: None)
        self._watchers: dict[str, Watcher] = {}
        self._keeper = IncidentKeeper()
        self._ids: dict[str, int] = {}
        self._local = LocalServers()
        self._samples: list[Sample] = []
        self._written_s = 0.0

    def take(self, result: ScrapeResult) -> ServerView:
        """Handle one scrape result: update findings, history, incidents and journal; returns the server's view."""
        result = with_start_reason(self._local.with_process_figures(result))
        self.scrapes += 1
        if self._recorder is not None:
            self._recorder.add(result)
        watcher = self._watchers.get(result.server)
        if watcher is None:
            watcher = self._watchers[result.server] = Watcher(result.server, self.levels, self.plan_of(result.server))
        is_recent = abs(time.time() - result.time_s) < 60.0  # an older result is from a recording
        what = failed_under_way(result) if is_recent else None
        if what is not None:
            waiting = replace(server_view(watcher, self.levels), state="unreachable", sentence=f"{what}: no answer yet")
            self.views[result.server] = waiting
            return waiting  # it is being started
        findings = watcher.take(result)
        now = self.views[result.server] = server_view(watcher, self.levels)
        self._append_history(result, now, watcher)
        changed = self._keeper.update(result.server, "", findings)
        for incident in changed.opened:
            made = self._try_journal(partial(self._journal_opened, incident, watcher))
            self.changes.appendleft(IncidentChange(incident, False, result.time_s, made))
        for incident in changed.closed:
            self._report_closed(incident, OVER, result.time_s)
        if isinstance(result, Sample) and self._journal is not None:
            self._samples.append(result)
            if result.time_s - self._written_s >= 10.0:
                self._written_s = result.time_s
                self._write_samples()
        return now

    def plan_of(self, server: str) -> PlanDocument | None:
        """The server's own plan, else the one given for all; None without either."""
        return self._plans.get(server, self._plans.get(""))

    def comparison(self, server: str) -> tuple[ComparedFigure, ...]:
        """Planned against reported figures in the server's last sample; () without a plan or sample."""
        plan, watcher = self.plan_of(server), self._watchers.get(server)
        if plan is None or watcher is None or not watcher.window.is_answering or watcher.window.latest is None:
            return ()
        return compare_with_plan(plan, watcher.window.latest, self.levels)

    def remove_server(self, server: str) -> None:
        """Forgets a server that no source lists any more and closes its incidents."""
        for incident in self._keeper.forget(server):
            self._report_closed(incident, UNWATCHED, time.time())
        for known in (self.views, self.history, self._watchers):
            known.pop(server, None)

    def _append_history(self, result: ScrapeResult, now: ServerView, watcher: Watcher) -> None:
        """Appends KV use, requests and rates of the latest step; a failed scrape appends a point without values."""
        kept = self.history.get(result.server)
        if kept is None:
            points = MAX_HISTORY if len(self.history) < _WITH_LONG_HISTORY else _SHORT_HISTORY
            kept = self.history[result.server] = deque(maxlen=points)
        if isinstance(result, ScrapeFailure):
            kept.append(HistoryPoint(result.time_s))
            return
        step = watcher.window.steps[-1] if watcher.window.steps else None
        names = ("generation_tokens", "preemptions")
        tokens, preemptions = ((step.total(name) or 0.0) / step.seconds if step else 0.0 for name in names)
        running, waiting = now.running or 0.0, now.waiting or 0.0
        kept.append(HistoryPoint(result.time_s, now.kv_use, running, waiting, tokens, preemptions))

    def add_immediate_findings(self, server: str) -> ServerView:
        """Adds findings of conditions that the last scrape alone shows (`--once`); returns the server's view."""
        watcher, now = self._watchers[server], self.views[server]
        known = {finding.kind: finding for finding in now.findings}
        at_once = {}
        for detector in watcher.detectors:
            seen = detector.measure(watcher.window, now.time_s) if detector.kind not in known else None
            if seen is not None and seen.is_bad and (detector.kind in _IMMEDIATE_KINDS or seen.is_certain):
                found = detector.finding(watcher.window, now.time_s, seen)
                at_once[detector.kind] = replace(found, restart_helps=False)
        if at_once and now.state != "unreachable":
            both, kinds = known | at_once, [detector.kind for detector in watcher.detectors]
            watcher.findings = tuple(both[kind] for kind in kinds if kind in both)
            self.views[server] = server_view(watcher, self.levels)
        return self.views[server]

    def scraped_only_once(self) -> list[str]:
        """Names of servers with a single sample, for which no rates are known."""
        windows = {name: watcher.window for name, watcher in self._watchers.items()}
        return [name for name, window in windows.items() if window.is_answering and not window.steps]

    @property
    def open_incidents(self) -> tuple[OpenIncident, ...]:
        """Open incidents, oldest first."""
        return self._keeper.all()

    def close(self) -> None:
        """Closes open incidents and writes what is buffered."""
        for incident in self._keeper.all():
            self._report_closed(incident, "lasted when watching ended", time.time())
        self._write_samples()
        if self._recorder is not None:
            self._recorder.close()

    def _journal_opened(self, incident: OpenIncident, watcher: Watcher, journal: Journal) -> int | None:
        """Journals a new incident and its remedies; returns its id, None if another live process has journalled it."""
        finding = incident.finding
        assert finding is not None  # it was just found
        for earlier in journal.incidents(server=incident.server, open_only=True):
            if earlier.kind == incident.kind:
                if _has_live_owner(earlier):
                    return None
                journal.close_incident(earlier.id, "lasted when its watcher was ended", finding.time_s)
        detail = incident.detail() | {"by": "watch", "pid": os.getpid()}
        made = journal.open_incident(
            incident.server, incident.kind, incident.title, detail, incident.opened_s, incident.key
        )
        journal.note(made, finding.reason, time_s=finding.time_s)
        self._ids[incident.key] = made
        from legroom.live.remedies import remedies_for  # planning is only needed once something is wrong

        remedies = remedies_for(finding, watcher.window, self.plan_of(incident.server))
        text = "what helps: " + "; ".join(remedy.why for remedy in remedies)
        journal.note(made, text, {"answers": [remedy.to_json() for remedy in remedies]}, finding.time_s)
        return made

    def _report_closed(self, incident: OpenIncident, outcome: str, time_s: float) -> None:
        """Records the end of an incident in `changes` and the journal."""
        made = self._ids.pop(incident.key, None)
        self.changes.appendleft(IncidentChange(incident, True, time_s, made))
        if made is not None:
            self._try_journal(lambda journal: journal.close_incident(made, outcome, time_s))

    def _write_samples(self) -> None:
        """Writes the buffered samples to the journal, if there is one."""
        samples, self._samples = self._samples, []
        if samples:
            self._try_journal(lambda journal: journal.add_samples(samples))

    def _try_journal(self, call: Callable[[Journal], int | None]) -> int | None:
        """The result of `call` on the journal; None without a journal or where it fails, which is only logged."""
        if self._journal is None:
            return None
        try:
            return call(self._journal)
        except JournalUnavailable as error:
            self.log(f"{error.message}: watching without it")
            self._journal = None
            return None


def _has_live_owner(incident: Incident) -> bool:
    """Whether the process that opened the incident (sidecar or `watch`) may still live, and so will close it."""
    if incident.detail.get("by") != "watch":
        return True
    try:
        os.kill(int(incident.detail["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, KeyError, ValueError, TypeError, OverflowError):
        return False
    return True


def check_once(config: SidecarConfig, session: WatchSession, gap_s: float) -> None:
    """Scrapes each server a few times, `gap_s` seconds apart, then adds what the last scrape alone shows."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_scrape_all(config, session, gap_s))
    else:
        with ThreadPoolExecutor(1, "legroom watch") as beside:
            beside.submit(asyncio.run, _scrape_all(config, session, gap_s)).result()
    for server in session.views:
        session.add_immediate_findings(server)


async def _scrape_all(config: SidecarConfig, session: WatchSession, gap_s: float) -> None:
    """Feeds the session a few scrapes of all servers, `gap_s` seconds apart, from any of the sources."""
    if config.prometheus is not None:
        await _poll_last_scrapes(config.prometheus, session, gap_s)
    endpoints = [server.endpoint for server in config.servers]
    if (pods := config.kubernetes) is not None:
        problem, found, api = f"no pod has the labels {pods.selector}", dict[str, Endpoint](), pods_api(pods.context)
        try:
            found = await asyncio.to_thread(discovered_endpoints, api, pods.selector, pods.namespace)
        except LegroomError as error:
            problem = error.message
        if not (found or endpoints or session.views):
            raise LegroomError(problem, "no server could be scraped", UNREACHABLE)
        endpoints += found.values()
    from legroom.live.metrics.scrape import open_session, scrape_result  # slow to import

    async with open_session() as connections:
        for number in range(ONCE_SCRAPES):
            await asyncio.sleep(gap_s if number else 0)
            results = await asyncio.gather(*(scrape_result(connections, endpoint) for endpoint in endpoints))
            for result in results:
                session.take(result)


async def _poll_last_scrapes(config: PrometheusConfig, session: WatchSession, gap_s: float) -> None:
    """Feeds the session each server's last scrapes in Prometheus; up to 65 s, asks every `gap_s` for a second one."""
    from legroom.live.metrics.scrape import open_session
    from legroom.sidecar.sources import prometheus_source  # slow to import

    # Prometheus' default scrape interval and 5 s.
    source, now_s, until = prometheus_source(config), time.time(), time.monotonic() + 65.0
    async with open_session() as connections:
        for ago_s in _SCRAPES_AGO_S:
            for result in await source.poll(connections, now_s - ago_s, is_past=True):
                session.take(result)
        while True:
            for result in await source.poll(connections, time.time()):
                session.take(result)
            once_only = session.scraped_only_once()
            if not once_only or time.monotonic() >= until:
                break
            await asyncio.sleep(gap_s)
    if once_only:
        session.log(f"Prometheus shows one scrape only of {', '.join(once_only)}: rates and waits were not evaluated")


async def stream(config: SidecarConfig, session: WatchSession, show: Callable[[ServerView], None]) -> None:
    """Scrapes until cancelled and passes each server's view to `show` after every scrape."""
    from legroom.sidecar.sources import combined_source  # slow to import

    source = combined_source(config, session.log)
    await source(lambda result: show(session.take(result)), session.remove_server, frozenset)


def replayed_views(path: Path, session: WatchSession) -> Iterator[ServerView]:
    """The server's view after each scrape of a recording, without waiting between them."""
    from legroom.live.metrics.scrape_recording import replay

    for result in replay(path):
        yield session.take(result)


def watched_views(config: SidecarConfig, session: WatchSession) -> Iterator[ServerView]:
    """Yields a server's view after each scrape (in a thread of its own); closing the iterator ends the scraping."""
    seen: queue.Queue[ServerView | BaseException] = queue.Queue(4096)
    stop = threading.Event()

    async def scrape_until_stopped() -> None:
        """Runs `stream` until the caller closes the iterator."""
        task = asyncio.create_task(stream(config, session, seen.put))
        while not stop.is_set() and not task.done():
            await asyncio.wait([task], timeout=0.05)
        task.cancel()
        await task

    def run_in_thread() -> None:
        """Runs `scrape_until_stopped`; hands an exception to the iterator."""
        try:
            asyncio.run(scrape_until_stopped())
        except asyncio.CancelledError:
            return
        except BaseException as error:
            seen.put(error)

    thread = threading.Thread(target=run_in_thread, name="legroom watch", daemon=True)
    thread.start()
    try:
        while True:
            item = seen.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(10)
        session.close()
