"""Notifications, without ever waiting for a receiver: for each webhook a bounded queue and one patient sender."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from legroom.actions.notify import Notification, Webhook, post
from legroom.actions.platform import ActionFailed
from legroom.records import dataclass
from legroom.sidecar.http import SidecarMetrics
from legroom.sidecar.incidents import OpenIncident

_MOST_WAITING = 200
_AGAIN_S = 60.0  # Alertmanager forgets an alert that is not repeated (resolve_timeout, five minutes)
_NUMBER_LOOKS, _NUMBER_PAUSE_S = 20, 0.05
_Queue = asyncio.Queue[tuple[OpenIncident, Notification]]


@dataclass(frozen=True)
class ActionReport:
    """Something that happened while acting, for the journal, the notifications and the metrics."""

    incident: OpenIncident | None
    text: str
    name: str
    outcome: str | None = None
    """How an action ended; None for a refusal or a beginning."""


def _notification(incident: OpenIncident, text: str, closed_s: float | None) -> Notification:
    finding = incident.finding
    text = text or (finding.reason if finding else incident.reason)
    return Notification(
        incident.number, incident.server, incident.group, incident.kind, incident.title, text,
        incident.opened_s, closed_s, incident.severity, dict(finding.numbers) if finding else {},
    )  # fmt: skip


class Notifier:
    """Posts notifications. `notify` never blocks; what a dead webhook leaves behind is dropped, the oldest first."""

    def __init__(self, hooks: Sequence[Webhook], metrics: SidecarMetrics, say: Callable[[str], None]) -> None:
        self._hooks, self._metrics, self._say = hooks, metrics, say
        self._queues: list[_Queue] = [asyncio.Queue(_MOST_WAITING) for _ in hooks]

    def notify(self, incident: OpenIncident, text: str = "", closed_s: float | None = None) -> None:
        """Queues a notification for every webhook: what is seen now, or `text`; none once it is acknowledged."""
        if not incident.acknowledged:
            for queue in self._queues:
                _put(queue, (incident, _notification(incident, text, closed_s)))

    def repeat(self, incidents: Sequence[OpenIncident]) -> None:
        """Queues what lasts again, where the receiver forgets."""
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
                self._say(error.message)
            else:
                self._metrics.notified.labels("taken").inc()
            finally:
                queue.task_done()

    async def drain(self, seconds: float) -> None:
        """A last moment for what is queued, and for what is being sent."""
        if self._queues:
            await asyncio.wait([asyncio.ensure_future(queue.join()) for queue in self._queues], timeout=seconds)


async def _number(incident: OpenIncident) -> int | None:
    """The incident's number, for which the journal needs a moment."""
    for _ in range(_NUMBER_LOOKS):
        if incident.number is not None:
            break
        await asyncio.sleep(_NUMBER_PAUSE_S)
    return incident.number


def _put(queue: _Queue, notification: tuple[OpenIncident, Notification]) -> None:
    if queue.full():
        queue.get_nowait()
        queue.task_done()
    queue.put_nowait(notification)
