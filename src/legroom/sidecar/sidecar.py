"""The sidecar: scrapes servers, keeps incidents, applies the policy, acts, and journals all of it. One event loop
scrapes and decides, and one thread owns the journal. An unreachable server, a full disk, a failing webhook or a long
action delays nothing else."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from legroom.errors import LegroomError
from legroom.files import single_process
from legroom.live.detectors import DETECTORS, Watcher
from legroom.live.forecast import pool_forecast
from legroom.live.gpu_memory import LocalServers
from legroom.live.journal.journal import journal_path
from legroom.live.journal.journal_buffer import JournalThread
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.endpoint import is_loopback_host
from legroom.live.metrics.sample import Sample, ScrapeFailure, ScrapeResult
from legroom.live.metrics.scrape import open_session, scrape_result
from legroom.live.run_record import failed_under_way, with_start_reason
from legroom.masking import masked
from legroom.sidecar.acting import Actor
from legroom.sidecar.action_policy import ACTION_NAMES
from legroom.sidecar.decisions import RemedySearch
from legroom.sidecar.notifier import IncidentReporter, Notifier
from legroom.sidecar.open_incidents import OVER, UNWATCHED, IncidentKeeper, OpenIncident, close_leftovers, left_open
from legroom.sidecar.server_restart import ActionContext
from legroom.sidecar.sidecar_http import SidecarMetrics, make_app
from legroom.sidecar.sources import Source, combined_source
from legroom.sidecar.watch_config import ServerConfig, SidecarConfig

_MIN_FLUSH_INTERVAL_S = 1.0
_FORECAST_S = 30.0  # a forecast costs more than all detectors, and a trend of minutes changes slowly


class Sidecar:
    """A sidecar process. `run` returns after `stop`."""

    def __init__(self, config: SidecarConfig, log: Callable[[str], None]) -> None:
        self._config, self._log = config, log
        self.token = config.token
        self.any_host = not is_loopback_host(config.host)
        """Whether other machines may ask, which know it by other names."""
        path = config.journal or journal_path()
        self._journal = JournalThread(path)
        self._metrics = SidecarMetrics()
        self._notifier = Notifier(config.webhooks, self._metrics, log)
        self._keeper = IncidentKeeper()
        self._local = LocalServers()
        self._watchers: dict[str, Watcher] = {}
        self._groups = {server.name: server.group for server in config.servers}
        self._servers = {server.name: server for server in config.servers}
        self._reporter = IncidentReporter(self._journal, self._notifier, self._metrics, log)
        self._remedies = RemedySearch(self._reporter)
        self._samples: list[Sample] = []
        self._last_scrape_s = time.monotonic()
        self._journal_problem: str | None = None
        self._journal_replaced: str | None = None
        self._answered_earlier_s: dict[str, float] = {}
        self._has_taken_over = False
        """False until the unfinished actions of an earlier process are read: nothing is done to a server before."""
        self._last_error = ""
        self._next_forecast_s: dict[str, float] = {}
        self._under_way: dict[str, str] = {}
        """Server -> what a `legroom run` is doing to it."""
        context = ActionContext(self._journal.call, self._journal.write, self._scrape, path.parent, config.poll_s)
        self._actor = Actor(config, context, self._reporter.report_action)
        self._stopping = asyncio.Event()
        self._session: Any = None

    async def run(self, source: Source) -> None:
        """Watches the servers of `source` until `stop` is called."""
        self._session = open_session()
        runner = await self._start_http()
        for name in {*self._groups.values(), "default"}:
            for action in ACTION_NAMES:
                self._metrics.acting.labels(action, name).set(action in self._config.group(name).act)
        await self._take_over()
        scraping = source(self._take_safely, self.remove_server, self._expected_servers)
        notifying, stopped = self._notifier.run(self._keeper.all), self._stopping.wait()
        work: tuple[Any, ...] = (scraping, self._write_samples(), self._maintain_journal(), notifying, stopped)
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a source that ended with an error is one
        finally:
            await self._shut_down(tasks, runner)

    def stop(self) -> None:
        self._stopping.set()

    async def _shut_down(self, tasks: list[asyncio.Task[Any]], runner: Any) -> None:
        """Stops acting, sends notifications for a second, cancels all tasks, and closes HTTP server and journal."""
        self._stopping.set()
        await self._actor.stop()
        await self._notifier.drain(1.0)
        under_way = (*tasks, *self._remedies.tasks)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await runner.cleanup()
        await self._session.close()
        self._flush_samples()
        await self._journal.close()

    async def _start_http(self) -> Any:
        """The running aiohttp AppRunner; raises LegroomError where the port cannot be bound."""
        from aiohttp import web  # slow to import

        runner = web.AppRunner(make_app(self), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            await self._session.close()
            raise LegroomError(f"cannot listen on {host} port {port}: {error.strerror}", "name another port") from error
        if not is_loopback_host(host):
            self._log(f"listening on {host}: others can read metrics and incidents; acting needs the token")
        return runner

    async def _take_over(self) -> None:
        """Takes over the open incidents and unfinished actions of an earlier sidecar."""
        # Retried while the journal cannot be read; no action is taken before.
        try:
            left = await self._journal.call(left_open)
            self._answered_earlier_s = await self._journal.call(lambda journal: journal.last_answers_s())
            if self._config.prometheus is not None or self._config.kubernetes is not None:
                for incident in left:
                    self._groups.setdefault(incident.server, "default")  # they may well be found there again
            patience_s = {detector.kind: detector(self._config.thresholds).warm_up_s for detector in DETECTORS}
            kept = self._keeper.take_over(left, self._groups, patience_s)
            await self._journal.call(lambda journal: close_leftovers(journal, left, kept, self._groups))
            await self._actor.recover()
        except JournalUnavailable as error:
            if self._journal_problem is None:
                self._log(f"{error.message}; watching without it, and not acting")
            self._journal_problem = error.message
        else:
            self._has_taken_over = True

    def _expected_servers(self) -> frozenset[str]:
        """Servers with an incident of an earlier sidecar, still open, that no source has listed yet."""
        troubled = frozenset(incident.server for incident in self._keeper.all())
        return troubled - self._watchers.keys() - self._servers.keys()

    def _take_safely(self, result: ScrapeResult) -> None:
        """Handle a scrape result; an exception is logged as a bug, so that watching goes on."""
        try:
            self.take(result)
        except Exception as error:
            text = f"{result.server}: this scrape could not be evaluated: {error!r}"
            if text != self._last_error:
                self._log(text)
            self._last_error = text

    def take(self, result: ScrapeResult) -> None:
        """Handle one scrape result: findings, incidents, actions, metrics and the journal's samples."""
        if self._stopping.is_set():
            return
        self._last_scrape_s = time.monotonic()
        result = self._actor.with_start_reason(with_start_reason(self._local.with_process_figures(result)))
        group = self._groups.setdefault(result.server, "default")
        watcher = self._watchers.get(result.server)
        if watcher is None:
            server = self._servers.get(result.server)
            watcher = Watcher(result.server, self._config.thresholds, server.plan if server is not None else None)
            self._watchers[result.server] = watcher
        watcher.window.answered_earlier_s = self._answered_earlier_s.get(result.server)
        is_acted_on = self._actor.is_acting_on(result.server)
        under_way = failed_under_way(result)
        for incident in self._keeper.of_server(result.server):
            if under_way is not None and incident.meanwhile != under_way:
                self._reporter.note(incident, under_way)
            incident.meanwhile = under_way or ""
        if under_way is not None and not is_acted_on and self._under_way.get(result.server) != under_way:
            self._log(f"{result.server}: {under_way}: its silence is no incident, and nothing is done here")
            self._under_way[result.server] = under_way
        if isinstance(result, ScrapeFailure) and (is_acted_on or under_way is not None):
            watcher.reset_pending_durations()
            self._update_metrics(result, watcher, group)
            return
        self._under_way.pop(result.server, None)
        findings = watcher.take(result)
        if isinstance(result, Sample):
            self._samples.append(result)
        self._update_metrics(result, watcher, group)
        if is_acted_on:
            return  # it is being restarted
        changes = self._keeper.update(result.server, group, findings)
        for incident in changes.opened:
            self._reporter.report_opened(incident)
        for incident in changes.worse:
            self._reporter.report_critical(incident)
        for incident in changes.closed:
            self._close_incident(incident)
        incidents = self._keeper.of_server(result.server)
        if not incidents:
            return
        servers, unhealthy = self._group_health(group)
        for incident in incidents:
            self._remedies.begin(incident, self._servers.get(result.server), watcher.window)
            if self._has_taken_over:
                self._actor.consider(incident, watcher, servers, unhealthy)

    def remove_server(self, server: str) -> None:
        """Forgets a server that no source lists any more and closes its incidents; a configured one stays."""
        if server in self._servers:
            return
        for incident in self._keeper.forget(server):
            self._close_incident(incident, UNWATCHED)
        self._watchers.pop(server, None)
        self._next_forecast_s.pop(server, None)
        self._metrics.remove_server(server, self._groups.pop(server, "default"))

    def _close_incident(self, incident: OpenIncident, outcome_text: str = OVER) -> None:
        """Ends the incident's drains and reports its end; `outcome_text`: `over`, or why it is watched no more."""
        self._actor.end_drain_of(incident)
        self._reporter.report_closed(incident, outcome_text)

    def _update_metrics(self, result: ScrapeResult, watcher: Watcher, group: str) -> None:
        """Counts the scrape and, at intervals, sets the gauge of seconds until the KV pool is full (or infinity)."""
        self._metrics.count_scrape(result, group, not (_is_critical(watcher) or result.server in self._under_way))
        if self._last_scrape_s < self._next_forecast_s.get(result.server, 0.0):
            return
        self._next_forecast_s[result.server] = self._last_scrape_s + _FORECAST_S
        ahead = pool_forecast(watcher.window, self._config.thresholds)
        self._metrics.full_in.labels(result.server, group).set(ahead.full_in_s if ahead is not None else float("inf"))

    def _group_health(self, group: str) -> tuple[int, int]:
        """(Servers in the group, those of them that are critical, being restarted or never scraped)."""
        members = [name for name, own in self._groups.items() if own == group]
        watched = [self._watchers[name] for name in members if name in self._watchers]
        unhealthy = [it for it in watched if _is_critical(it) or it.window.server in self._under_way]
        return len(members), len(unhealthy) + len(members) - len(watched)

    async def _scrape(self, server: ServerConfig) -> ScrapeResult:
        """Scrape one server now, for an action that waits for it."""
        return await scrape_result(self._session, server.endpoint)

    def _flush_samples(self) -> None:
        """Hand the buffered samples to the journal's thread."""
        samples, self._samples = self._samples, []
        self._journal.add_samples(samples)

    async def _write_samples(self) -> None:
        """Writes buffered samples to the journal at intervals, and logs when the journal fails or recovers."""
        while True:
            await asyncio.sleep(max(self._config.interval_s, _MIN_FLUSH_INTERVAL_S))
            self._flush_samples()
            replaced = self._journal.buffer.replaced
            if replaced is not None and replaced != self._journal_replaced:
                self._log(replaced)
                for incident in self._keeper.all():
                    self._reporter.journal_opened(incident)
            self._journal_replaced = replaced
            problem = self._journal.buffer.problem
            if problem != self._journal_problem:
                waiting = "not acting until it can be written" if problem else "the journal is written again"
                self._log(f"{problem}; {waiting}" if problem else waiting)
            self._journal_problem = problem
            if not self._has_taken_over:
                await self._take_over()
            if error_text := self._journal.take_error():
                self._log(f"an entry of the journal was given up: {error_text}")

    async def _maintain_journal(self) -> None:
        """Rolls up and deletes old samples of the journal every ten minutes until cancelled; failures are logged."""
        while True:
            try:
                await self._journal.maintain()
            except Exception as error:  # watching goes on
                self._log(f"the journal could not be tidied: {error!r}")
            await asyncio.sleep(600.0)

    def metrics_and_content_type(self) -> tuple[bytes, str]:
        """The sidecar's metrics in Prometheus' text format, and their content type."""
        return self._metrics.page_and_type(self._keeper.all(), self._journal)

    def health(self) -> dict[str, Any]:
        """The /healthz document: `ok` while scrapes come in; `acting`: actions allowed and possible now."""
        can_act = self._has_taken_over and self._journal.buffer.problem is None
        quiet_s = time.monotonic() - self._last_scrape_s
        return {
            "ok": quiet_s < 6 * self._config.interval_s + 30.0,
            "last_look_s": round(quiet_s, 3),
            "servers": len(self._watchers),
            "incidents_open": len(self._keeper.all()),
            "journal": self._journal.buffer.problem or "ok",
            "journal_replaced": self._journal.buffer.replaced,
            "acting": sorted(self._config.act) if can_act else [],
        }

    async def incidents_json(self, since_s: float | None, limit: int) -> list[dict[str, Any]]:
        """Incidents of the journal from `since_s` on; the open ones while the journal cannot be read."""
        try:
            listed = await self._journal.call(lambda journal: journal.incidents(since_s, limit=limit))
        except JournalUnavailable:
            lasting = self._keeper.all()
            return [{"server": incident.server, "title": incident.title, **incident.detail()} for incident in lasting]
        return [incident.to_json() for incident in listed]

    async def acknowledge(self, incident_id: int, person: str) -> None:
        """Ends notifications about an incident and notes who asked (`person`) in the journal; or LegroomError."""
        acknowledged = await self._journal.call(lambda journal: journal.incident(incident_id))
        if acknowledged is None:
            raise LegroomError(f"there is no incident {incident_id}")
        for incident in self._keeper.all():
            if incident.key == acknowledged.key:
                incident.acknowledged = True
        text, detail = f"acknowledged by {person}", {"acknowledged": True}
        await self._journal.call(lambda journal: journal.note(incident_id, text, detail))

    async def act_on_request(self, action: str, server: str, undo_action_id: int | None) -> dict[str, Any]:
        """Starts a requested action: `accepted`, `reason` and, for a refusal, `again_in_s` (seconds until it ends)."""
        if not self._has_taken_over:
            raise JournalUnavailable("what an earlier legroom left is not known yet: the journal cannot be read")
        servers, unhealthy = self._group_health(self._groups.get(server, "default"))
        decision = await self._actor.act_on_request(action, server, undo_action_id, servers, unhealthy)
        return {"accepted": decision.action is not None, "reason": decision.reason, "again_in_s": decision.again_in_s}


def _is_critical(watcher: Watcher) -> bool:
    """Whether any detector of the server has a critical finding."""
    return any(finding.severity == "critical" for finding in watcher.findings)


def run_sidecar(config: SidecarConfig) -> int:
    """Runs the sidecar until SIGTERM or SIGINT; returns 0. LegroomError where another uses the same journal."""
    journal = config.journal or journal_path()
    lock = journal.with_name(f"{journal.name}.sidecar")
    refusal = f"another legroom already watches with the journal {journal}"
    with single_process(lock, _to_stderr, "a second sidecar away", lambda pid: LegroomError(f"{refusal} (pid {pid})")):
        asyncio.run(_run_until_signal(config))
    return 0


async def _run_until_signal(config: SidecarConfig) -> None:
    """Runs a Sidecar on all configured sources until SIGTERM or SIGINT."""
    sidecar = Sidecar(config, _to_stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, sidecar.stop)
    acting = sorted(config.act - {"notify"})
    _to_stderr(f"watching {_sources_text(config)}; {'acting: ' + ', '.join(acting) if acting else 'reporting only'}")
    await sidecar.run(combined_source(config, _to_stderr))
    _to_stderr("stopped")


def _sources_text(config: SidecarConfig) -> str:
    """In words, the number of configured servers and the discovery in use."""
    discovery = (("Prometheus", config.prometheus), ("Kubernetes", config.kubernetes))
    listed = [f"what {name} lists" for name, source_name in discovery if source_name is not None]
    named = [f"{len(config.servers)} server{'s' if len(config.servers) != 1 else ''}"] if config.servers else []
    return " and ".join((*named, *listed)) or "nothing"


def _to_stderr(text: str) -> None:
    """Prints a line with the local time to stderr, with secrets masked."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} legroom: {masked(text)}", file=sys.stderr, flush=True)
