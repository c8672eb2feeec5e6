"""Telling the world, without ever waiting for it: a bounded queue and one patient sender a webhook."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from legroom.actions.notify import Message, Webhook, notify
from legroom.actions.platform import ActionFailed
from legroom.holding.sidecar_incidents import OpenIncident
from legroom.holding.sidecar_metrics import SidecarMetrics
from legroom.records import dataclass

_MOST_WAITING = 200
_AGAIN_S = 60.0  # Alertmanager forgets an alert that is not repeated (resolve_timeout, five minutes)


@dataclass(frozen=True)
class Said:
    """Something that happened while acting, for the journal, the messages and the figures."""

    incident: OpenIncident | None
    text: str
    name: str
    outcome: str | None = None
    """How an action ended; None for a refusal or a beginning."""


def message_of(incident: OpenIncident, text: str = "", closed_s: float | None = None) -> Message:
    """An incident as it is told."""
    finding = incident.finding
    text = text or (finding.reason if finding else "")
    return Message(
        None, incident.server, incident.group, incident.kind, incident.title, text,
        incident.opened_s, closed_s, incident.severity, dict(finding.numbers) if finding else {},
    )  # fmt: skip


class Telling:
    """Posts messages. `tell` never blocks; what a dead webhook leaves behind is dropped, the oldest first."""

    def __init__(self, hooks: Sequence[Webhook], metrics: SidecarMetrics, say: Callable[[str], None]) -> None:
        self._hooks, self._metrics, self._say = hooks, metrics, say
        self._queues: list[asyncio.Queue[Message]] = [asyncio.Queue(_MOST_WAITING) for _ in hooks]

    def tell(self, message: Message) -> None:
        """Queues a message for every webhook."""
        for queue in self._queues:
            _put(queue, message)

    def repeat(self, messages: Sequence[Message]) -> None:
        """Queues what lasts again, where the receiver forgets."""
        for hook, queue in zip(self._hooks, self._queues, strict=True):
            for message in messages if hook.format == "alertmanager" else ():
                _put(queue, message)

    async def run(self, lasting: Callable[[], Sequence[Message]]) -> None:
        """Sends for ever."""
        async with asyncio.TaskGroup() as group:
            for hook, queue in zip(self._hooks, self._queues, strict=True):
                group.create_task(self._send(hook, queue))
            while True:
                await asyncio.sleep(_AGAIN_S)
                self.repeat(lasting())

    async def _send(self, hook: Webhook, queue: asyncio.Queue[Message]) -> None:
        while True:
            message = await queue.get()
            try:
                await notify(hook, message)
            except ActionFailed as error:
                self._metrics.notified.labels("failed").inc()
                self._say(error.message)
            else:
                self._metrics.notified.labels("taken").inc()
            finally:
                queue.task_done()

    async def drain(self, seconds: float) -> None:
        """A last moment for what is queued."""
        pending = [queue.join() for queue in self._queues if queue.qsize()]
        if pending:
            await asyncio.wait([asyncio.ensure_future(one) for one in pending], timeout=seconds)


def _put(queue: asyncio.Queue[Message], message: Message) -> None:
    if queue.full():
        queue.get_nowait()
        queue.task_done()
    queue.put_nowait(message)
