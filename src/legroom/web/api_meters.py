"""The API's own figures, for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.web.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OTHER = "other"
"""Every path that is no endpoint: names that visitors make up are no labels."""


class ApiMeters:
    """Counts that cost nothing beside the requests themselves."""

    def __init__(self) -> None:
        self.is_ready = False
        self.under_way = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._times = [0] * (len(_EDGES_S) + 1)
        self._seconds = 0.0

    def answered(self, path: str, status: int, seconds: float) -> None:
        name = path.removeprefix("/api/")
        self._requests[name if name in ENDPOINTS else _OTHER, status] += 1
        if name in ENDPOINTS:
            self._times[bisect_left(_EDGES_S, seconds)] += 1
            self._seconds += seconds

    def page(self) -> str:
        """As a Prometheus reads it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# HELP legroom_api_requests_total Requests, by endpoint and status."
        yield "# TYPE legroom_api_requests_total counter"
        for (endpoint, status), number in sorted(self._requests.items()):
            yield f'legroom_api_requests_total{{endpoint="{endpoint}",status="{status}"}} {number}'
        yield "# HELP legroom_api_requests_under_way Requests that are being answered."
        yield "# TYPE legroom_api_requests_under_way gauge"
        yield f"legroom_api_requests_under_way {self.under_way}"
        family = "legroom_api_request_seconds"
        yield from (f"# HELP {family} How long the endpoints took.", f"# TYPE {family} histogram")
        reached = 0
        for edge, number in zip((*map(str, _EDGES_S), "+Inf"), self._times, strict=True):
            reached += number
            yield f'{family}_bucket{{le="{edge}"}} {reached}'
        yield from (f"{family}_sum {self._seconds!r}", f"{family}_count {reached}")


class MeteredLayer:
    """Counts every answer, refused ones too."""

    def __init__(self, app: ASGIApp, meters: ApiMeters) -> None:
        self._app, self._meters = app, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._meters.under_way += 1
        try:
            await self._app(scope, receive, counting)
        finally:
            self._meters.under_way -= 1
            self._meters.answered(scope["path"], status, time.perf_counter() - began)
