"""What `legroom watch` sees, for pages that are open: one watcher, any number of readers. It only scrapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from legroom.sidecar.watch_session import IncidentChange, WatchSession, stream

if TYPE_CHECKING:
    from legroom.live.plan_comparison import ComparedFigure
    from legroom.live.server_view import ServerView
    from legroom.planning.plan_document import PlanDocument
    from legroom.sidecar.watch_config import SidecarConfig

_MOST_UNREAD = 1_000
"""Events kept for a reader that is slow; then it is given the present state anew."""
_KEEP_ALIVE_S = 15.0
_POINTS = 120
"""Of a server's curve, to begin with: ten minutes at five seconds."""
_END = ""


class LiveFeed:
    """Scrapes at servers while it runs, and tells every reader."""

    def __init__(self, config: SidecarConfig, plan: PlanDocument | None = None) -> None:
        self._config = config
        self._session = WatchSession(config.thresholds, {"": plan} if plan else None)
        self._compared: dict[str, tuple[ComparedFigure, ...]] = {}
        self._readers: set[asyncio.Queue[str]] = set()
        self._is_closed = False
        self._last_change: IncidentChange | None = None

    async def run(self) -> None:
        """Look for ever."""
        try:
            await stream(self._config, self._session, self._show)
        finally:
            self.close()

    def close(self) -> None:
        """Let every reader go."""
        self._is_closed = True
        for reader in self._readers:
            _put(reader, _END)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: how it has been, then every scrape."""
        reader: asyncio.Queue[str] = asyncio.Queue(_MOST_UNREAD)
        self._readers.add(reader)
        try:
            for text in self._present():
                yield text
            while not self._is_closed:
                try:
                    text = await asyncio.wait_for(reader.get(), _KEEP_ALIVE_S)
                except TimeoutError:
                    text = ": still here\n\n"
                if text == _END:
                    return
                yield text
        finally:
            self._readers.discard(reader)

    def _present(self) -> list[str]:
        curves = {
            server: [asdict(point) for point in list(points)[-_POINTS:]]
            for server, points in self._session.history.items()
        }
        looks = [event(view.to_json()) for view in self._session.views.values()]
        plans = [self._comparison(server) for server in self._compared]
        return [event(curves, "history"), event(self._incidents(), "incidents"), *looks, *plans]

    def _show(self, view: ServerView) -> None:
        newest = self._session.changes[0] if self._session.changes else None
        texts = [event(view.to_json())]
        if newest is not self._last_change:
            self._last_change = newest
            texts.append(event(self._incidents(), "incidents"))
        compared = self._session.comparison(view.server)
        if compared and compared != self._compared.get(view.server):  # a pool keeps its size: hardly ever
            self._compared[view.server] = compared
            texts.append(self._comparison(view.server))
        for reader in self._readers:
            for text in texts:
                _put(reader, text)

    def _comparison(self, server: str) -> str:
        plan = self._session.plan_of(server)
        assert plan is not None
        figures = [asdict(figure) | {"is_as_planned": figure.is_as_planned} for figure in self._compared[server]]
        planned = {"model": plan.model, "vllm": plan.vllm, "gpu": plan.gpu.name, "gpus": plan.gpu.count}
        return event({"server": server, "plan": planned | {"command": list(plan.command)}, "figures": figures}, "plan")

    def _incidents(self) -> list[dict[str, Any]]:
        """Those that began or ended lately, the newest first."""
        return [
            {
                "server": change.incident.server,
                "kind": change.incident.kind,
                "title": change.incident.title,
                "severity": change.incident.severity,
                "opened_s": change.incident.opened_s,
                "time_s": change.time_s,
                "is_over": change.is_over,
                "reason": change.incident.finding.reason if change.incident.finding else change.incident.reason,
                "entry": change.incident.finding.entry if change.incident.finding else None,
            }
            for change in self._session.changes
        ]


def _put(reader: asyncio.Queue[str], text: str) -> None:
    """The newest is worth more than the oldest."""
    if reader.full():
        reader.get_nowait()
    reader.put_nowait(text)


def event(document: Any, name: str = "") -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document, separators=(',', ':'))}\n\n"
