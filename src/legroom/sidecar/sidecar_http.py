"""The sidecar's HTTP: metrics, health and incidents; with a token, acknowledging and acting."""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.live.journal.journal_buffer import JournalThread
from legroom.live.metrics.sample import Sample, ScrapeResult
from legroom.sidecar.action_policy import ACTION_NAMES
from legroom.sidecar.open_incidents import OpenIncident

if TYPE_CHECKING:
    from aiohttp import web

    from legroom.sidecar.sidecar import Sidecar


class SidecarMetrics:
    """The `legroom_*` metrics of a sidecar."""

    def __init__(self) -> None:
        import prometheus_client  # slow to import
        from prometheus_client import CollectorRegistry, Counter, Gauge

        untyped: Any = prometheus_client
        untyped.disable_created_metrics()
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"legroom_{name}", about, labels, registry=registry)

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"legroom_{name}", about, labels, registry=registry)

        server = ("server", "group")
        self.scrapes = counter("looks", "Scrapes of servers, by result.", ("result",))
        self.up = gauge("server_up", "Whether a server answered the last scrape.", server)
        self.healthy = gauge("server_healthy", "Whether nothing critical is found at a server.", server)
        self.kv_use = gauge("server_kv_use", "Share of a server's KV pool in use.", server)
        self.full_in = gauge("server_pool_full_seconds", "Forecast: seconds until the pool is full.", server)
        self.open = gauge("incidents_open", "Incidents that last.", ("kind", "severity"))
        self.opened = counter("incidents", "Incidents opened.", ("kind",))
        self.actions = counter("actions", "Actions ended, by how.", ("name", "outcome"))
        self.refusals = counter("refusals", "Times that the policy refused to act.")
        self.notified = counter("notifications", "Messages sent, by whether they were taken.", ("result",))
        self.journal_ok = gauge("journal_writable", "Whether the journal could be written last.")
        self.journal_waiting = gauge("journal_waiting", "Entries that wait to be written.")
        self.journal_lost = gauge("journal_lost", "Entries given up since the start.")
        self.acting = gauge("acting", "Whether an action is turned on.", ("name", "group"))

    def count_scrape(self, result: ScrapeResult, group: str, is_healthy: bool) -> None:
        self.scrapes.labels("sample" if isinstance(result, Sample) else result.kind).inc()
        self.up.labels(result.server, group).set(isinstance(result, Sample))
        self.healthy.labels(result.server, group).set(is_healthy)
        if isinstance(result, Sample) and result.kv_use is not None:
            self.kv_use.labels(result.server, group).set(result.kv_use)

    def remove_server(self, server: str, group: str) -> None:
        for gauge in (self.up, self.healthy, self.kv_use, self.full_in):
            with contextlib.suppress(KeyError):
                gauge.remove(server, group)

    def set_allowed_actions(self, group: str, act: frozenset[str]) -> None:
        for name in ACTION_NAMES:
            self.acting.labels(name, group).set(name in act)

    def text(self, open_incidents: Iterable[OpenIncident], journal: JournalThread) -> tuple[bytes, str]:
        """The exposition and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        self.open.clear()
        for incident in open_incidents:
            self.open.labels(incident.kind, incident.severity).inc()
        self.journal_ok.set(journal.problem is None)
        self.journal_waiting.set(journal.waiting)
        self.journal_lost.set(journal.lost)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


_MAX_BODY_BYTES = 64 * 1024
"""Of a POST: a JSON object of three fields."""


def make_app(served: Sidecar) -> web.Application:
    from aiohttp import web  # slow to import

    async def metrics(_: web.Request) -> web.Response:
        text, kind = served.metrics_text()
        return web.Response(body=text, headers={"Content-Type": kind})

    async def healthz(_: web.Request) -> web.Response:
        health = served.health()
        return web.json_response(health, status=200 if health["ok"] else 503)

    async def incidents(request: web.Request) -> web.Response:
        since_s = _number_of_query(request.query.get("since_s"), "since_s")
        limit = min(int(_number_of_query(request.query.get("limit"), "limit") or 100), 1000)
        return web.json_response({"incidents": await served.incidents_json(since_s, limit)})

    async def ack(request: web.Request) -> web.Response:
        body = await _json_body(request)
        number = _row_id(body.get("incident"))
        if number is None:
            raise LegroomError("`incident` must be the number of one")
        await served.acknowledge(number, str(body.get("by", "somebody"))[:100])
        return web.json_response({"acknowledged": number})

    async def act(request: web.Request) -> web.Response:
        body = await _json_body(request)
        undo = body.get("undo")
        if undo is not None and _row_id(undo) is None:
            raise LegroomError("`undo` must be the number of an action")
        answer = await served.act_on_request(str(body.get("action", "restart")), str(body.get("server", "")), undo)
        return web.json_response(answer, status=202 if answer["accepted"] else 409)

    @web.middleware
    async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            refused = _unauthorised(request, served.token)
            if refused is not None:
                return refused
        try:
            answer: web.StreamResponse = await handler(request)
        except LegroomError as error:
            return web.json_response({"error": error.message, "hint": error.hint}, status=400)
        return answer

    app = web.Application(middlewares=[authorise], client_max_size=_MAX_BODY_BYTES)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/incidents", incidents)
    app.router.add_post("/ack", ack)
    app.router.add_post("/act", act)
    return app


def _unauthorised(request: web.Request, token: str | None) -> web.Response | None:
    """A 401 response where the bearer token is wrong, else None."""
    from aiohttp import web

    if token is None:
        return web.json_response({"error": "no token is set, so nothing can be changed here"}, status=403)
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    # Constant time, against timing attacks.
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        return web.json_response(
            {"error": "wrong or no token"}, status=401, headers={"WWW-Authenticate": 'Bearer realm="legroom"'}
        )
    return None


async def _json_body(request: web.Request) -> dict[str, Any]:
    try:
        document = json.loads(await request.text() or "{}")
    except ValueError as error:
        raise LegroomError("the body is not JSON") from error
    if not isinstance(document, dict):
        raise LegroomError("the body must be a JSON object")
    return document


def _row_id(given: Any) -> int | None:
    """A valid SQLite row id, else None."""
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 < given < 2**63 else None


def _number_of_query(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise LegroomError(f"`{name}` must be a number") from error
    if not 0 <= value < 1e12:
        raise LegroomError(f"`{name}` must be a number from 0 on")
    return value
