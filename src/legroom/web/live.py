"""The samples and incidents of `legroom watch` as server-sent events, for any number of open pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from legroom.live.detectors.plan_drift import ComparedFigure
from legroom.live.server_view import ServerView
from legroom.planning.plan_document import PlanDocument
from legroom.sidecar.watch_config import SidecarConfig
from legroom.sidecar.watch_session import IncidentChange, WatchSession, stream

_MAX_UNREAD_EVENTS = 1_000  # Per reader; then its oldest events are dropped.
_MAX_POINTS = 120
_END = ""


class LiveFeed:
    """Scrapes servers and passes every sample to every reader."""

    def __init__(self, config: SidecarConfig, plan: PlanDocument | None = None) -> None:
        self._config = config
        self._session = WatchSession(config.thresholds, {"": plan} if plan else None)
        self._compared: dict[str, tuple[ComparedFigure, ...]] = {}
        self._readers: set[asyncio.Queue[str]] = set()
        self._is_closed = False
        self._last_change: IncidentChange | None = None

    async def run(self) -> None:
        """Scrape the watched servers and publish each sample to all readers, until cancelled."""
        try:
            await stream(self._config, self._session, self._publish_view)
        finally:
            self.close()

    def close(self) -> None:
        """End every reader's stream."""
        self._is_closed = True
        for reader in self._readers:
            _put_dropping_oldest(reader, _END)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events for one reader as text: the current state, then each sample, or a comment every 15 s."""
        reader: asyncio.Queue[str] = asyncio.Queue(_MAX_UNREAD_EVENTS)
        self._readers.add(reader)
        try:
            for text in self._current_state():
                yield text
            while not self._is_closed:
                try:
                    text = await asyncio.wait_for(reader.get(), 15.0)
                except TimeoutError:
                    text = ": still here\n\n"
                if text == _END:
                    return
                yield text
        finally:
            self._readers.discard(reader)

    def _current_state(self) -> list[str]:
        """Events for a new reader: each server's recent samples, the incidents, its newest sample and its plan."""
        histories = self._session.history.items()
        curves = {server: [asdict(point) for point in list(points)[-_MAX_POINTS:]] for server, points in histories}
        samples = [sse_event(view.to_json()) for view in self._session.views.values()]
        plans = [self._comparison_event(server) for server in self._compared]
        return [sse_event(curves, "history"), sse_event(self._recent_incidents(), "incidents"), *samples, *plans]

    def _publish_view(self, view: ServerView) -> None:
        """Sends a server's new sample to all readers, and the incidents and its plan where they have changed."""
        newest = self._session.changes[0] if self._session.changes else None
        texts = [sse_event(view.to_json())]
        if newest is not self._last_change:
            self._last_change = newest
            texts.append(sse_event(self._recent_incidents(), "incidents"))
        compared = self._session.comparison(view.server)
        if compared and compared != self._compared.get(view.server):  # only after a restart with another pool
            self._compared[view.server] = compared
            texts.append(self._comparison_event(view.server))
        for reader in self._readers:
            for text in texts:
                _put_dropping_oldest(reader, text)

    def _comparison_event(self, server: str) -> str:
        """The server-sent event `plan`: a server's plan, and each figure as planned and as measured."""
        plan = self._session.plan_of(server)
        assert plan is not None
        figures = [asdict(figure) | {"is_as_planned": figure.is_as_planned} for figure in self._compared[server]]
        planned: dict[str, Any] = {"model": plan.model, "vllm": plan.vllm, "gpu": plan.gpu.name, "gpus": plan.gpu.count}
        planned["command"] = list(plan.command)
        return sse_event({"server": server, "plan": planned, "figures": figures}, "plan")

    def _recent_incidents(self) -> list[dict[str, Any]]:
        """The recently opened and closed incidents as JSON objects, newest first."""
        shown = ("server", "kind", "title", "severity", "opened_s")
        return [
            {
                **{name: getattr(change.incident, name) for name in shown},
                "time_s": change.time_s,
                "is_over": change.is_over,
                "reason": change.incident.finding.reason if change.incident.finding else change.incident.reason,
                "entry": change.incident.finding.entry if change.incident.finding else None,
            }
            for change in self._session.changes
        ]


def _put_dropping_oldest(reader: asyncio.Queue[str], text: str) -> None:
    """Queue an event; a full queue drops its oldest."""
    if reader.full():
        reader.get_nowait()
    reader.put_nowait(text)


def sse_event(document: Any, name: str = "") -> str:
    """A server-sent event with the document as JSON data; unnamed without `name`."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document, separators=(',', ':'))}\n\n"
