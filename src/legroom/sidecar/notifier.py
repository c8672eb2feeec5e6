"""Reports incidents to the log, the journal, the metrics and webhooks (plain JSON, Alertmanager or Slack)."""

from __future__ import annotations

import asyncio
import collections
import datetime
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from legroom.actions.platform import ActionFailed
from legroom.masking import masked
from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.live.journal.journal import Journal
    from legroom.live.journal.journal_buffer import JournalThread
    from legroom.sidecar.open_incidents import OpenIncident
    from legroom.sidecar.sidecar_http import SidecarMetrics

Format = Literal["json", "alertmanager", "slack"]
FORMATS: tuple[Format, ...] = ("json", "alertmanager", "slack")
_TRIES = 4
REPEAT_S = 60.0
"""Between messages of an open incident: below Alertmanager's resolve_timeout of five minutes."""
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Webhook:
    """A receiver. Its address may contain a secret."""

    url: str = field(repr=False)
    format: Format = "json"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown_host(self) -> str:
        """The host of the webhook's address, safe to log."""
        return str(masked(self.url.split("?")[0])).partition("://")[2].partition("/")[0] or "the webhook"

    @property
    def key(self) -> str:
        """The webhook's name in the journal: its host, and a digest of its address, as one host may have several."""
        return f"{self.shown_host}#{hashlib.sha256(self.url.encode()).hexdigest()[:8]}"

    def needs_post(self, incident: OpenIncident) -> bool:
        """Whether to post an open incident (again): not if acknowledged, nor if posted already at its present severity.
        Alertmanager forgets alerts that are not repeated, so it gets those again."""
        is_told = self.format != "alertmanager" and incident.told.get(self.key) == incident.severity
        return not (is_told or incident.acknowledged)


def message_of(incident: OpenIncident, text: str = "", closed_s: float | None = None) -> dict[str, Any]:
    """The fields of a notification about an incident now; `text`: by default its reason; `closed_s`: the Unix time of
    its end, None while it lasts."""
    finding = incident.finding
    return {
        "incident": incident.number,
        **{name: getattr(incident, name) for name in ("server", "group", "kind", "severity")},
        "title": f"{incident.title}; {incident.meanwhile}" if incident.meanwhile else incident.title,
        "text": text or (finding.reason if finding else incident.reason),
        "opened_s": incident.opened_s,
        "closed_s": closed_s,
        "detail": dict(finding.numbers) if finding else {},
    }


def body_of(message: Mapping[str, Any], style: Format) -> Any:
    """The JSON body of a message in the webhook's format, with secrets masked."""
    sent = {**message, **{name: masked(message[name]) for name in ("title", "text", "detail")}}
    number, closed_s = sent["incident"], sent["closed_s"]
    if style == "json":
        return sent
    if style == "slack":
        state = "over" if closed_s is not None else sent["severity"]
        shown = f" (incident {number})" if number is not None else ""
        return {"text": masked(f"[{state}] {sent['server']}: {sent['title']}{shown}\n{sent['text']}".strip())}
    labels = {"alertname": f"legroom_{sent['kind']}", "instance": sent["server"]}
    alert: dict[str, Any] = {
        "labels": labels | {name: sent[name] for name in ("group", "severity")},
        "annotations": {"summary": sent["title"], "description": sent["text"]},
        "startsAt": _iso_time(sent["opened_s"]),
    }
    if number is not None:
        alert["annotations"]["incident"] = str(number)
    if closed_s is not None:
        alert["endsAt"] = _iso_time(closed_s)
    return [alert]


async def post_with_retries(
    hook: Webhook, message: Mapping[str, Any], first_pause_s: float = 1.0, tries: int = _TRIES
) -> None:
    """Posts a message, at most `tries` times; ActionFailed after the last, or at once where a retry cannot help."""
    import aiohttp

    url = hook.url
    if hook.format == "alertmanager" and "/api/" not in url:
        url = url.rstrip("/") + "/api/v2/alerts"
    problem = ""
    timeout = aiohttp.ClientTimeout(total=10.0)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        for number in range(tries):
            if number:
                await asyncio.sleep(first_pause_s * 4 ** (number - 1))
            try:
                body = body_of(message, hook.format)
                async with session.post(url, json=body, headers=dict(hook.headers), allow_redirects=False) as answer:
                    if answer.status < 300:
                        return
                    problem = f"it answered {answer.status}"
                    if answer.status not in _TRY_AGAIN:
                        break
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                problem = f"it cannot be reached ({type(error).__name__})"
    raise ActionFailed(f"{hook.shown_host} did not take the message: {problem}")


def _iso_time(time_s: float) -> str:
    """A Unix time in the format of Alertmanager: UTC with milliseconds and `Z`."""
    at = datetime.datetime.fromtimestamp(time_s, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_Queue = asyncio.Queue[tuple["OpenIncident", dict[str, Any]]]


@dataclass(frozen=True)
class ActionReport:
    """An action's start, refusal or outcome."""

    incident: OpenIncident | None
    text: str
    name: str
    outcome: str | None = None
    """None for a start or a refusal."""


class Notifier:
    """Sends notifications. `notify` never blocks; a full queue drops its oldest entry."""

    def __init__(self, hooks: Sequence[Webhook], metrics: SidecarMetrics, log: Callable[[str], None]) -> None:
        self._hooks, self._metrics, self._log = hooks, metrics, log
        self.note: Callable[[OpenIncident, str, Mapping[str, Any]], None] = lambda *_: None
        """Notes at an incident in the journal who was told."""
        self._queues: list[_Queue] = [asyncio.Queue(200) for _ in hooks]
        self._problems: dict[str, str] = {}
        """Webhook -> why it did not take the last message, so that an outage is logged once."""

    def notify(self, incident: OpenIncident, text: str = "", closed_s: float | None = None) -> None:
        """Queues a message (`text`, else the finding's reason) for every webhook, unless it is acknowledged."""
        if not incident.acknowledged:
            for queue in self._queues:
                if queue.full():
                    queue.get_nowait()
                    queue.task_done()
                queue.put_nowait((incident, message_of(incident, text, closed_s)))

    async def run(self, lasting: Callable[[], Sequence[OpenIncident]]) -> None:
        """Sends notifications to all webhooks until cancelled; `lasting()`: the open incidents, to repeat."""
        async with asyncio.TaskGroup() as group:
            for hook, queue in zip(self._hooks, self._queues, strict=True):
                group.create_task(self._serve_webhook(hook, queue, lasting))
            await asyncio.Event().wait()

    async def _serve_webhook(self, hook: Webhook, queue: _Queue, lasting: Callable[[], Sequence[OpenIncident]]) -> None:
        """Posts a webhook's messages in order; at first and every REPEAT_S, open incidents and unsent endings too."""
        clock, repeat_s = asyncio.get_running_loop().time, 0.0
        ends: collections.deque[tuple[OpenIncident, dict[str, Any]]] = collections.deque(maxlen=200)
        while True:
            if queue.empty() and clock() >= repeat_s:
                for incident in lasting():
                    if hook.needs_post(incident) and incident in lasting():
                        await self._post(hook, incident, message_of(incident), tries=1)
                while ends and await self._post(hook, *ends[0], tries=1):
                    ends.popleft()
                repeat_s = clock() + REPEAT_S
            try:
                async with asyncio.timeout_at(repeat_s):
                    incident, message = await queue.get()
            except TimeoutError:
                continue
            try:
                is_taken = await self._post(hook, incident, message)
                if not is_taken and message["closed_s"] is not None and hook.format != "alertmanager":
                    ends.append((incident, message))  # Alertmanager ends by itself what is not repeated
            finally:
                queue.task_done()

    async def _post(self, hook: Webhook, incident: OpenIncident, message: dict[str, Any], tries: int = _TRIES) -> bool:
        """Posts a message, counts it, and notes in the incident that this webhook was told; returns whether it was."""
        for _ in range(20):  # its number is written asynchronously
            if incident.number is None:
                await asyncio.sleep(0.05)
        try:
            await post_with_retries(hook, {**message, "incident": incident.number}, tries=tries)
        except ActionFailed as error:
            self._metrics.notified.labels("failed").inc()
            if self._problems.get(hook.key) != error.message:
                self._log(f"{error.message}; it is sent again every {REPEAT_S:g} s")
            self._problems[hook.key] = error.message
            return False
        self._metrics.notified.labels("taken").inc()
        self._problems.pop(hook.key, None)
        if message["closed_s"] is None and incident.told.get(hook.key) != message["severity"]:
            incident.told[hook.key] = message["severity"]
            self.note(incident, f"{hook.shown_host} was told", {"told": dict(incident.told)})
        return True

    async def drain(self, seconds: float) -> None:
        """Waits up to `seconds` for the queued messages to be sent."""
        if self._queues:
            await asyncio.wait([asyncio.ensure_future(queue.join()) for queue in self._queues], timeout=seconds)


class IncidentReporter:
    """Reports incidents without blocking: journal and notifier have queues."""

    def __init__(
        self, journal: JournalThread, notifier: Notifier, metrics: SidecarMetrics, log: Callable[[str], None]
    ) -> None:
        self._journal, self._notifier, self._metrics, self._log = journal, notifier, metrics, log
        notifier.note = self.note

    def report_opened(self, incident: OpenIncident) -> None:
        """Logs, counts, journals and notifies a new incident."""
        finding = incident.finding
        reason = finding.reason if finding is not None else ""
        self._log(f"{incident.server}: {incident.title}: {reason}")
        self._metrics.opened.labels(incident.kind).inc()
        self.journal_opened(incident)
        self._notifier.notify(incident)

    def journal_opened(self, incident: OpenIncident) -> None:
        """Queues the incident and its reason for the journal; once written, the incident has its `number`."""
        opened = (incident.server, incident.kind, incident.title, incident.detail(), incident.opened_s, incident.key)

        def open_incident(journal: Journal) -> None:
            """Writes the incident into the journal and keeps its number."""
            incident.number = journal.open_incident(*opened)

        self._journal.write(open_incident)
        self.note(incident, incident.finding.reason if incident.finding is not None else incident.reason)

    def report_critical(self, incident: OpenIncident) -> None:
        """Notes and notifies that an incident has become critical."""
        self.note(incident, "it has become critical", {"severity": incident.severity})
        self._notifier.notify(incident)

    def report_closed(self, incident: OpenIncident, outcome_text: str = "over") -> None:
        """Logs, journals and notifies an incident's end; `outcome_text`: `over`, or why it is watched no more."""
        unseen = incident.finding is None and outcome_text == "over"
        outcome = f"{outcome_text} while legroom was not watching" if unseen else outcome_text
        outcome += f", after {incident.last_action}" if incident.last_action else ""
        self._log(f"{incident.server}: {incident.title}: {outcome}")
        self._journal.write(lambda journal: journal.close_incident(journal.incident_id(incident.key) or 0, outcome))
        self._notifier.notify(incident, outcome, time.time())

    def note(self, incident: OpenIncident, text: str, detail: Mapping[str, Any] | None = None) -> None:
        """Appends a note to the incident in the journal, without a notification."""
        self._journal.write(lambda journal: journal.note(journal.incident_id(incident.key) or 0, text, detail))

    def report_action(self, report: ActionReport) -> None:
        """Logs and counts an action or refusal, and notes it in its incident; only actions are notified."""
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
