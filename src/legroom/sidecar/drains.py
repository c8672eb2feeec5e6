"""Doors that a `drain` closed. The journal alone knows them: whoever watches when an incident is over opens them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from legroom.actions.platform import ActionFailed
from legroom.live.journal.journal import DONE, FAILED, UNDONE, Action, Journal, JournalUnavailable
from legroom.sidecar.config import ServerConfig
from legroom.sidecar.incidents import BY, OpenIncident
from legroom.sidecar.notifier import Said
from legroom.sidecar.restart import Hands

REFUSED_AGAIN_S = 30.0
"""When what was refused or did not work is tried again."""
_LONGEST_PAUSE_S = 60.0


class Doors:
    """Closes doors for incidents and opens them again, every time in the journal."""

    def __init__(self, servers: Mapping[str, ServerConfig], hands: Hands, tell: Callable[[Said], None]) -> None:
        self._servers, self._hands, self._tell = servers, hands, tell

    async def close(self, incident: OpenIncident, server: ServerConfig, reason: str) -> None:
        """Keeps new work from a server until its incident is over. One that is closed for it already stays so."""
        door = server.door
        if door is None:
            raise ActionFailed(f"no way to stop new work at {server.name} is named")
        if await self._hands.keep(lambda journal: _closed_for(journal, incident.key)):
            incident.ask_again_s = float("inf")
            return
        self._tell(Said(incident, f"drain: {reason}", "drain"))
        detail = {"by": BY, "server": server.name, "door": door.name}
        number = await self._hands.keep(lambda journal: journal.incident_id(incident.key))
        action = await self._hands.keep(lambda journal: journal.begin_action(number, server.group, "drain", detail))
        try:
            await door.close()
            text, state = f"new work is kept from {server.name} by {door.name}", DONE
        except ActionFailed as error:
            text, state = error.message, FAILED
        await self._hands.finish(action, state, {"outcome": text})
        incident.ask_again_s = float("inf") if state == DONE else time.monotonic() + REFUSED_AGAIN_S
        self._tell(Said(incident, text, "drain", state))

    async def open_after(self, incident: OpenIncident) -> None:
        """Opens what was closed for an incident that is over, by this legroom or by one before it."""
        await self._open_surely(lambda journal: _closed_for(journal, incident.key), incident)

    async def open_again(self, drain: Action) -> None:
        """Opens what one drain closed."""
        await self._open_surely(lambda _: (drain,), None)

    async def _open_surely(self, find: Callable[[Journal], Iterable[Action]], incident: OpenIncident | None) -> None:
        """Goes on trying: a server that starts just now, or a full disk, must not leave a door closed for good."""
        pause_s, said = self._hands.poll_s, ""
        while True:
            try:
                for drain in await self._hands.keep(find):
                    await self._open(drain)
            except (ActionFailed, JournalUnavailable) as error:
                if error.message != said:
                    said = error.message
                    self._tell(Said(incident, f"the door is still closed: {said}", "drain"))
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self, drain: Action) -> None:
        server = self._servers.get(str(drain.detail.get("server")))
        if server is not None and server.door is not None:
            name = server.name
            if not await self._hands.keep(lambda journal: _others_at(journal, name, drain)):
                await server.door.open()
                self._tell(Said(None, f"{name}: new work is let in again", "drain"))
        await self._hands.finish(drain.id, UNDONE)


def left_closed(journal: Journal) -> tuple[Action, ...]:
    """Drains whose incident is over: legroom was not there to open the door."""
    return tuple(drain for drain in _drains(journal.actions()) if not _lasts(journal, drain))


def _closed_for(journal: Journal, key: str) -> tuple[Action, ...]:
    number = journal.incident_id(key)
    held = journal.incident(number) if number is not None else None
    return _drains(held.actions) if held is not None else ()


def _others_at(journal: Journal, server: str, drain: Action) -> tuple[Action, ...]:
    """Drains of the same server for incidents that last: the door is theirs too."""
    drains = _drains(journal.actions(group=drain.group))
    return tuple(
        one for one in drains if one.id != drain.id and one.detail.get("server") == server and _lasts(journal, one)
    )


def _drains(actions: Iterable[Action]) -> tuple[Action, ...]:
    return tuple(one for one in actions if one.name == "drain" and one.state == DONE and one.detail.get("by") == BY)


def _lasts(journal: Journal, drain: Action) -> bool:
    held = journal.incident(drain.incident_id) if drain.incident_id is not None else None
    return held is not None and held.closed_s is None
