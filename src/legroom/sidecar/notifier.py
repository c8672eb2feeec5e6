"""Webhook notifications in plain JSON, Alertmanager or Slack format. Each webhook has a bounded queue."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from legroom.actions.platform import ActionFailed
from legroom.masking import masked
from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.sidecar.open_incidents import OpenIncident
    from legroom.sidecar.sidecar_http import SidecarMetrics


Format = Literal["json", "alertmanager", "slack"]
FORMATS: tuple[Format, ...] = ("json", "alertmanager", "slack")
_TIMEOUT_S = 10.0
_TRIES = 4
_FIRST_PAUSE_S = 1.0
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Notification:
    """A message about one incident; with `closed_s` it is over."""

    incident: int | None
    """Its journal id; None where the journal could not be written."""
    server: str
    group: str
    kind: str
    title: str
    text: str
    opened_s: float
    closed_s: float | None = None
    severity: str = "warning"
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Webhook:
    """A receiver. Its address may contain a secret."""

    url: str = field(repr=False)
    format: Format = "json"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The host of the address."""
        return str(masked(self.url.split("?")[0])).partition("://")[2].partition("/")[0] or "the webhook"


def body_of(notification: Notification, style: Format) -> Any:
    if style == "slack":
        return _slack(notification)
    if style == "alertmanager":
        return [_alert(notification)]
    return _plain(notification)


def _plain(sent: Notification) -> dict[str, Any]:
    return {
        "incident": sent.incident,
        "server": sent.server,
        "group": sent.group,
        "kind": sent.kind,
        "severity": sent.severity,
        "title": masked(sent.title),
        "text": masked(sent.text),
        "opened_s": sent.opened_s,
        "closed_s": sent.closed_s,
        "detail": masked(dict(sent.detail)),
    }


def _slack(sent: Notification) -> dict[str, Any]:
    state = "over" if sent.closed_s is not None else sent.severity
    number = f" (incident {sent.incident})" if sent.incident is not None else ""
    return {"text": masked(f"[{state}] {sent.server}: {sent.title}{number}\n{sent.text}".strip())}


def _alert(sent: Notification) -> dict[str, Any]:
    alert: dict[str, Any] = {
        "labels": {
            "alertname": f"legroom_{sent.kind}",
            "instance": sent.server,
            "group": sent.group,
            "severity": sent.severity,
        },
        "annotations": {"summary": masked(sent.title), "description": masked(sent.text)},
        "startsAt": _iso(sent.opened_s),
    }
    if sent.incident is not None:
        alert["annotations"]["incident"] = str(sent.incident)
    if sent.closed_s is not None:
        alert["endsAt"] = _iso(sent.closed_s)
    return alert


async def post(hook: Webhook, notification: Notification, first_pause_s: float = _FIRST_PAUSE_S) -> None:
    """Posts with retries. Raises `ActionFailed` after the last."""
    import aiohttp

    url = hook.url
    if hook.format == "alertmanager" and "/api/" not in url:
        url = url.rstrip("/") + "/api/v2/alerts"
    problem = ""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(first_pause_s * 4 ** (number - 1))
            try:
                body = body_of(notification, hook.format)
                async with session.post(url, json=body, headers=dict(hook.headers), allow_redirects=False) as answer:
                    if answer.status < 300:
                        return
                    problem = f"it answered {answer.status}"
                    if answer.status not in _TRY_AGAIN:
                        break
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                problem = f"it cannot be reached ({type(error).__name__})"
    raise ActionFailed(f"{hook.shown} did not take the message: {problem}")


def _iso(time_s: float) -> str:
    return (
        datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


_MAX_QUEUED = 200
_AGAIN_S = 60.0  # below Alertmanager's resolve_timeout of five minutes
_NUMBER_CHECKS, _NUMBER_PAUSE_S = 20, 0.05
_Queue = asyncio.Queue[tuple["OpenIncident", Notification]]


@dataclass(frozen=True)
class ActionReport:
    """An action's start, refusal or outcome."""

    incident: OpenIncident | None
    text: str
    name: str
    outcome: str | None = None
    """None for a start or a refusal."""


def _notification(incident: OpenIncident, text: str, closed_s: float | None) -> Notification:
    finding = incident.finding
    text = text or (finding.reason if finding else incident.reason)
    return Notification(
        incident.number,
        incident.server,
        incident.group,
        incident.kind,
        incident.title,
        text,
        incident.opened_s,
        closed_s,
        incident.severity,
        dict(finding.numbers) if finding else {},
    )


class Notifier:
    """Sends notifications. `notify` never blocks; a full queue drops its oldest entry."""

    def __init__(self, hooks: Sequence[Webhook], metrics: SidecarMetrics, log: Callable[[str], None]) -> None:
        self._hooks, self._metrics, self._log = hooks, metrics, log
        self._queues: list[_Queue] = [asyncio.Queue(_MAX_QUEUED) for _ in hooks]

    def notify(self, incident: OpenIncident, text: str = "", closed_s: float | None = None) -> None:
        """Queues `text`, or the finding's reason, for every webhook, unless the incident is acknowledged."""
        if not incident.acknowledged:
            for queue in self._queues:
                _put(queue, (incident, _notification(incident, text, closed_s)))

    def repeat(self, incidents: Sequence[OpenIncident]) -> None:
        """Queues open incidents again for Alertmanager."""
        for hook, queue in zip(self._hooks, self._queues, strict=True):
            for incident in incidents if hook.format == "alertmanager" else ():
                if not incident.acknowledged:
                    _put(queue, (incident, _notification(incident, "", None)))

    async def run(self, lasting: Callable[[], Sequence[OpenIncident]]) -> None:
        async with asyncio.TaskGroup() as group:
            for hook, queue in zip(self._hooks, self._queues, strict=True):
                group.create_task(self._send(hook, queue))
            while True:
                await asyncio.sleep(_AGAIN_S)
                self.repeat(lasting())

    async def _send(self, hook: Webhook, queue: _Queue) -> None:
        while True:
            incident, notification = await queue.get()
            try:
                await post(hook, replace(notification, incident=await _number(incident)))
            except ActionFailed as error:
                self._metrics.notified.labels("failed").inc()
                self._log(error.message)
            else:
                self._metrics.notified.labels("taken").inc()
            finally:
                queue.task_done()

    async def drain(self, seconds: float) -> None:
        """Waits up to this long for queued messages to be sent."""
        if self._queues:
            await asyncio.wait([asyncio.ensure_future(queue.join()) for queue in self._queues], timeout=seconds)


async def _number(incident: OpenIncident) -> int | None:
    """The incident's journal id, which is written asynchronously."""
    for _ in range(_NUMBER_CHECKS):
        if incident.number is not None:
            break
        await asyncio.sleep(_NUMBER_PAUSE_S)
    return incident.number


def _put(queue: _Queue, notification: tuple[OpenIncident, Notification]) -> None:
    if queue.full():
        queue.get_nowait()
        queue.task_done()
    queue.put_nowait(notification)
