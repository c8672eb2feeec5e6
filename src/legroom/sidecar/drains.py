"""Servers that a `drain` keeps new work from. The journal alone knows them: whoever watches when an incident is over
ends the drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from legroom.actions.platform import ActionFailed
from legroom.live.journal.journal import DONE, FAILED, UNDONE, Action, Journal, JournalUnavailable
from legroom.sidecar.notifier import ActionReport
from legroom.sidecar.open_incidents import BY, OpenIncident
from legroom.sidecar.server_restart import ActionContext
from legroom.sidecar.watch_config import ServerConfig

REFUSED_AGAIN_S = 30.0
"""When what was refused or did not work is tried again."""
_LONGEST_PAUSE_S = 60.0


class Drains:
    """Begins drains for incidents and ends them, every time in the journal."""

    def __init__(
        self, servers: Mapping[str, ServerConfig], context: ActionContext, report: Callable[[ActionReport], None]
    ) -> None:
        self._servers, self._context, self._report = servers, context, report

    async def begin(self, incident: OpenIncident, server: ServerConfig, reason: str) -> None:
        """Keeps new work from a server until its incident is over. One that is drained for it already stays so."""
        drain_method = server.drain_method
        if drain_method is None:
            raise ActionFailed(f"no way to stop new work at {server.name} is named")
        if await self._context.journal(lambda journal: _drains_for(journal, incident.key)):
            incident.ask_again_s = float("inf")
            return
        self._report(ActionReport(incident, f"drain: {reason}", "drain"))
        detail = {"by": BY, "server": server.name, "door": drain_method.name}
        number = await self._context.journal(lambda journal: journal.incident_id(incident.key))
        action = await self._context.journal(
            lambda journal: journal.begin_action(number, server.group, "drain", detail)
        )
        try:
            await drain_method.begin()
            text, state = f"new work is kept from {server.name} by {drain_method.name}", DONE
        except ActionFailed as error:
            text, state = error.message, FAILED
        await self._context.finish(action, state, {"outcome": text})
        incident.ask_again_s = float("inf") if state == DONE else time.monotonic() + REFUSED_AGAIN_S
        self._report(ActionReport(incident, text, "drain", state))

    async def end_after(self, incident: OpenIncident) -> None:
        """Ends the drain of an incident that is over, begun by this legroom or by one before it."""
        await self._end_surely(lambda journal: _drains_for(journal, incident.key), incident)

    async def end(self, drain: Action) -> None:
        await self._end_surely(lambda _: (drain,), None)

    async def _end_surely(self, find: Callable[[Journal], Iterable[Action]], incident: OpenIncident | None) -> None:
        """Goes on trying: a server that starts just now, or a full disk, must not leave a server drained for good."""
        pause_s, last_problem = self._context.poll_s, ""
        while True:
            try:
                for drain in await self._context.journal(find):
                    await self._end(drain)
            except (ActionFailed, JournalUnavailable) as error:
                if error.message != last_problem:
                    last_problem = error.message
                    self._report(ActionReport(incident, f"new work is still turned away: {last_problem}", "drain"))
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _end(self, drain: Action) -> None:
        server = self._servers.get(str(drain.detail.get("server")))
        if server is not None and server.drain_method is not None:
            name = server.name
            if not await self._context.journal(lambda journal: _others_at(journal, name, drain)):
                await server.drain_method.end()
                self._report(ActionReport(None, f"{name}: new work is let in again", "drain"))
        await self._context.finish(drain.id, UNDONE)


def left_drained(journal: Journal) -> tuple[Action, ...]:
    """Drains whose incident is over: legroom was not there to end them."""
    return tuple(drain for drain in _drains(journal.actions()) if not _lasts(journal, drain))


def _drains_for(journal: Journal, key: str) -> tuple[Action, ...]:
    number = journal.incident_id(key)
    incident = journal.incident(number) if number is not None else None
    return _drains(incident.actions) if incident is not None else ()


def _others_at(journal: Journal, server: str, drain: Action) -> tuple[Action, ...]:
    """Drains of the same server for incidents that last: it stays drained for them."""
    drains = _drains(journal.actions(group=drain.group))
    return tuple(
        other
        for other in drains
        if other.id != drain.id and other.detail.get("server") == server and _lasts(journal, other)
    )


def _drains(actions: Iterable[Action]) -> tuple[Action, ...]:
    return tuple(
        action
        for action in actions
        if action.name == "drain" and action.state == DONE and action.detail.get("by") == BY
    )


def _lasts(journal: Journal, drain: Action) -> bool:
    incident = journal.incident(drain.incident_id) if drain.incident_id is not None else None
    return incident is not None and incident.closed_s is None
