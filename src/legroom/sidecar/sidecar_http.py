"""The sidecar's HTTP and its metrics: metrics, health and incidents; with a token, acknowledging and acting."""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from legroom.errors import LegroomError
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.endpoint import host_name, is_loopback_host
from legroom.live.metrics.sample import Sample, ScrapeResult

if TYPE_CHECKING:
    from aiohttp import web

    from legroom.live.journal.journal_buffer import JournalThread
    from legroom.sidecar.open_incidents import OpenIncident

_MAX_BODY_BYTES = 64 * 1024  # Of a POST: a JSON object of three fields.


class ServedSidecar(Protocol):
    """What the routes need of the sidecar."""

    token: str | None
    any_host: bool

    def metrics_and_content_type(self) -> tuple[bytes, str]: ...
    def health(self) -> dict[str, Any]: ...
    async def incidents_json(self, since_s: float | None, limit: int) -> list[dict[str, Any]]: ...
    async def acknowledge(self, incident_id: int, person: str) -> None: ...
    async def act_on_request(self, action: str, server: str, undo_action_id: int | None) -> dict[str, Any]:
        """Starts `restart`, or `undo` of action `undo_action_id`, on a server: `accepted`, `reason`, `again_in_s`."""


def make_app(served: ServedSidecar) -> web.Application:
    """The HTTP app with the sidecar's routes; any method but GET and HEAD needs the token."""
    from aiohttp import web  # slow to import

    async def metrics(_: web.Request) -> web.Response:
        """GET /metrics: the sidecar's own metrics."""
        text, kind = served.metrics_and_content_type()
        return web.Response(body=text, headers={"Content-Type": kind})

    async def healthz(_: web.Request) -> web.Response:
        """GET /healthz: the health document, with status 503 unless it is `ok`."""
        health = served.health()
        return web.json_response(health, status=200 if health["ok"] else 503)

    async def incidents(request: web.Request) -> web.Response:
        """GET /incidents: JSON of the incidents, by the query parameters `since_s` and `limit`."""
        since_s = _number_of_query(request.query.get("since_s"), "since_s")
        limit = min(int(_number_of_query(request.query.get("limit"), "limit") or 100), 1000)
        return web.json_response({"incidents": await served.incidents_json(since_s, limit)})

    async def ack(request: web.Request) -> web.Response:
        """Acknowledges the incident whose id is `incident` in the JSON body, for the person `by`."""
        body = await _json_body(request)
        number = _row_id(body.get("incident"))
        if number is None:
            raise LegroomError("`incident` must be the number of one")
        await served.acknowledge(number, str(body.get("by", "somebody"))[:100])
        return web.json_response({"acknowledged": number})

    async def act(request: web.Request) -> web.Response:
        """Starts the `action` in the JSON body on its `server`; 202 if accepted, 409 if the policy refuses it."""
        body = await _json_body(request)
        undo = body.get("undo")
        if undo is not None and _row_id(undo) is None:
            raise LegroomError("`undo` must be the number of an action")
        answer = await served.act_on_request(str(body.get("action", "restart")), str(body.get("server", "")), undo)
        return web.json_response(answer, status=202 if answer["accepted"] else 409)

    @web.middleware
    async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
        """Middleware: the handler's response; an error for another machine's Host, a wrong token, or an exception."""
        if not served.any_host and not is_loopback_host(host_name(", ".join(request.headers.getall("Host", ())))):
            # DNS rebinding: another site can point its name at 127.0.0.1 and read the answers.
            return web.json_response({"error": "this address is not one of this machine's own"}, status=421)
        if request.method not in ("GET", "HEAD"):
            refused = _unauthorised(request, served.token)
            if refused is not None:
                return refused
        try:
            answer: web.StreamResponse = await handler(request)
        except LegroomError as error:
            status = 503 if isinstance(error, JournalUnavailable) else 400
            return web.json_response({"error": error.message, "hint": error.hint}, status=status)
        return answer

    app = web.Application(middlewares=[authorise], client_max_size=_MAX_BODY_BYTES)
    pages = [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/incidents", incidents)]
    app.add_routes([*pages, web.post("/ack", ack), web.post("/act", act)])
    return app


def _unauthorised(request: web.Request, token: str | None) -> web.Response | None:
    """A 401 response for a wrong bearer token, 403 if no token is configured; None where it is right."""
    from aiohttp import web

    if token is None:
        return web.json_response({"error": "no token is set, so nothing can be changed here"}, status=403)
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    # Constant time, against timing attacks.
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        scheme = {"WWW-Authenticate": 'Bearer realm="legroom"'}
        return web.json_response({"error": "wrong or no token"}, status=401, headers=scheme)
    return None


async def _json_body(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body, empty without a body; raises LegroomError for anything else."""
    try:
        document = json.loads(await request.text() or "{}")
    except ValueError as error:
        raise LegroomError("the body is not JSON") from error
    if not isinstance(document, dict):
        raise LegroomError("the body must be a JSON object")
    return document


def _row_id(given: Any) -> int | None:
    """The value if it can be a SQLite row id, else None."""
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 < given < 2**63 else None


def _number_of_query(text: str | None, name: str) -> float | None:
    """A query parameter as a number of at least 0; None where it is not given, LegroomError where wrong."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise LegroomError(f"`{name}` must be a number") from error
    if not 0 <= value < 1e12:
        raise LegroomError(f"`{name}` must be a number from 0 on")
    return value


class SidecarMetrics:
    def __init__(self) -> None:
        import prometheus_client  # slow to import
        from prometheus_client import CollectorRegistry, Counter, Gauge

        untyped: Any = prometheus_client
        untyped.disable_created_metrics()
        registry = self.registry = CollectorRegistry()

        def gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
            """A gauge `legroom_{name}` in the sidecar's registry, with the help text `about`."""
            return Gauge(f"legroom_{name}", about, labels, registry=registry)

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            """A counter `legroom_{name}` in the sidecar's registry, with the help text `about`."""
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
        """Counts the result by kind, and sets the server's up, healthy and KV use gauges."""
        self.scrapes.labels("sample" if isinstance(result, Sample) else result.kind).inc()
        self.up.labels(result.server, group).set(isinstance(result, Sample))
        self.healthy.labels(result.server, group).set(is_healthy)
        if isinstance(result, Sample) and result.kv_use is not None:
            self.kv_use.labels(result.server, group).set(result.kv_use)

    def remove_server(self, server: str, group: str) -> None:
        """Removes the server's gauges (up, healthy, KV use, forecast), which would keep their last values."""
        for gauge in (self.up, self.healthy, self.kv_use, self.full_in):
            with contextlib.suppress(KeyError):
                gauge.remove(server, group)

    def page_and_type(self, open_incidents: Iterable[OpenIncident], journal: JournalThread) -> tuple[bytes, str]:
        """(Metrics page in Prometheus' text format, content type), with gauges of the given incidents and journal."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        self.open.clear()
        for incident in open_incidents:
            self.open.labels(incident.kind, incident.severity).inc()
        self.journal_ok.set(journal.buffer.problem is None)
        self.journal_waiting.set(journal.buffer.waiting)
        self.journal_lost.set(journal.buffer.lost)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
