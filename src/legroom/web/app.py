"""The ASGI application of `legroom ui`: the page, the API, the live feed, probes and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legroom.web.endpoint_processes import EndpointProcesses, Refused, WorkerAnswer, WorkerLimits
from legroom.web.endpoints import ENDPOINTS, ApiEndpoint
from legroom.web.openapi import openapi_document
from legroom.web.page_files import page_file
from legroom.web.security import COOKIE, Access, SecurityLayer, error_response

if TYPE_CHECKING:
    from legroom.web.live import LiveFeed

MAX_BODY_BYTES = 80 << 20
"""Of a JSON request: a log of 64 MiB and the escapes of JSON."""
MAX_LOG_BYTES = 4 << 30
"""Of a streamed log."""
_MAX_SILENCE_S = 30.0
_LOG_TYPES = ("text/plain", "application/octet-stream")


class ApiMetrics:
    """The series `legroom_api_*`."""

    def __init__(self) -> None:
        untyped: Any = prometheus_client
        untyped.disable_created_metrics()
        self.is_ready = False
        self._registry = CollectorRegistry()
        name, about, labels = "legroom_api_requests", "Requests, by endpoint and status.", ("endpoint", "status")
        self._requests = Counter(name, about, labels, registry=self._registry)
        about = "Requests that are being answered."
        self.under_way = Gauge("legroom_api_requests_under_way", about, registry=self._registry)
        name, about = "legroom_api_request_seconds", "How long the endpoints took."
        buckets = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        self._seconds = Histogram(name, about, buckets=buckets, registry=self._registry)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Counts an answer by endpoint (else `other`) and HTTP status; a histogram gets the `seconds` of endpoints."""
        name = path.removeprefix("/api/")
        self._requests.labels(name if name in ENDPOINTS else "other", status).inc()
        if name in ENDPOINTS:
            self._seconds.observe(seconds)

    async def metrics_page(self, request: Request) -> Response:
        """GET /metrics: this server's own metrics, in Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def readiness(self, request: Request) -> Response:
        """GET /readyz: 200 when a worker is warm, else 503."""
        if self.is_ready:
            return JSONResponse({"status": "ok"})
        return error_response(503, "it has just started, or is about to end", "ask again in a moment")


class MetricsLayer:
    """Middleware that counts every answer, refusals included."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = time.perf_counter(), 500

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._metrics.under_way.track_inprogress():
            try:
                await self._app(scope, receive, send_and_note_status)
            finally:
                self._metrics.count(scope["path"], status, time.perf_counter() - started_s)


def create_app(access: Access, limits: WorkerLimits, feed: LiveFeed | None, *, page: bool) -> Starlette:
    """The application; `feed` follows running servers. Without `page` it serves the API alone."""
    processes = EndpointProcesses(limits)
    metrics = ApiMetrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        """Warms up a worker and watches the servers while the app runs; cancels both at its end."""
        warming = asyncio.create_task(_warm_up_worker(processes, metrics))
        watching = asyncio.create_task(feed.run()) if feed is not None else None
        try:
            yield
        finally:
            metrics.is_ready = False
            for task in (warming, watching):
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    routes: list[BaseRoute] = [
        Route("/healthz", _healthz),
        Route("/readyz", metrics.readiness),
        Route("/metrics", metrics.metrics_page),
        Route("/openapi.json", partial(_openapi, page)),
        *([Route("/api/live", partial(_live_events, feed))] if page else []),
        *(_endpoint_route(endpoint, processes) for endpoint in ENDPOINTS.values()),
        Route("/{path:path}", _serve_page_file if page else _not_found),
    ]
    outer = [Middleware(MetricsLayer, metrics=metrics), Middleware(SecurityLayer, access=access)]
    layers = [*outer, Middleware(GZipMiddleware, compresslevel=5)]
    handlers = {HTTPException: _http_error, 500: _internal_error}
    return Starlette(routes=routes, middleware=layers, lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]


async def _healthz(request: Request) -> Response:
    """GET /healthz: always 200 while the process serves."""
    return JSONResponse({"status": "ok"})


async def _warm_up_worker(processes: EndpointProcesses, metrics: ApiMetrics) -> None:
    """Has a worker load its modules, and sets `metrics.is_ready` once one can answer."""
    async with asyncio.TaskGroup() as group:
        group.create_task(processes.warm_up())
        await processes.is_warm.wait()  # a request may be answered before the warm-up ends
        metrics.is_ready = True


async def _openapi(page: bool, request: Request) -> Response:
    """GET /openapi.json; with `page` the document includes the live events."""
    return JSONResponse(openapi_document(live=page))


async def _not_found(request: Request, hint: str = "/openapi.json says what there is") -> Response:
    """404 with this hint, or 405 where the path is an API endpoint that takes another method."""
    path = request.url.path
    if path.startswith("/api/") and path.removeprefix("/api/") in ENDPOINTS:
        answer = error_response(405, f"{path} wants a POST", "see /openapi.json")
        answer.headers["allow"] = "POST"
        return answer
    return error_response(404, f"there is nothing at {path}", hint)


async def _serve_page_file(request: Request) -> Response:
    """A file of the web page (or 304, 404); a `token` in the query becomes a cookie by a redirect."""
    token = request.query_params.get("token")
    if token is not None:
        # Removes the token from the address, and so from the browser's history.
        redirect = RedirectResponse(request.url.path, 303)
        redirect.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return redirect
    file = page_file(request.path_params["path"])
    if file is None:
        return await _not_found(request, "the page is at /")
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers={"etag": file.etag})
    return Response(file.body, headers={"etag": file.etag, "cache-control": "no-cache"}, media_type=file.media_type)


def _worker_response(answer: WorkerAnswer) -> Response:
    """The HTTP response with a worker's JSON document, which no cache keeps."""
    return Response(answer.body, answer.status, {"cache-control": "no-store"}, "application/json")


def _endpoint_route(endpoint: ApiEndpoint, processes: EndpointProcesses) -> Route:
    """The route /api/NAME, which passes each request to a worker process."""

    async def handle(request: Request) -> Response:
        """The worker's answer to a request's JSON or log, or the error response."""
        try:
            if request.method != "POST":
                return _worker_response(await processes.call(endpoint.name, b"{}"))
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            query = {name: value for name, value in request.query_params.items() if name != "token"}
            query = query if endpoint.name == "diagnose" else {}
            if kind in _LOG_TYPES and endpoint.name == "diagnose":
                return _worker_response(await processes.diagnose(query, _body_pieces(request, MAX_LOG_BYTES)))
            if kind != "application/json":
                return error_response(415, "the request is not JSON", "send it as application/json")
            body = b"".join([piece async for piece in _body_pieces(request, MAX_BODY_BYTES)])
            return _worker_response(await processes.call(endpoint.name, body, query))
        except Refused as refused:
            return error_response(refused.status, refused.message, refused.hint, refused.exit_code)
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone

    methods = ["GET", "POST"] if endpoint.without_input else ["POST"]
    return Route(f"/api/{endpoint.name}", handle, methods=methods)


async def _body_pieces(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body in pieces; `Refused` where it is larger than `max_bytes`, or no piece arrives for 30 seconds."""
    length = request.headers.get("content-length", "")
    announced, received = int(length) if length.isascii() and length.isdigit() else 0, 0
    stream = aiter(request.stream())
    while max(announced, received) <= max_bytes:
        try:
            piece = await asyncio.wait_for(anext(stream), _MAX_SILENCE_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refused(408, "the request stopped coming", "send it again") from None
        received += len(piece)
        if piece:
            yield piece
    shown = f"{max_bytes / 2**30:.0f} GiB" if max_bytes >= 2**30 else f"{max_bytes >> 20} MiB"
    hint = "send the log as text/plain, its last run only, or use legroom diagnose FILE"
    raise Refused(413, f"the request is larger than {shown}", hint)


async def _live_events(feed: LiveFeed | None, request: Request) -> Response:
    """The server-sent events; 404 where no servers are watched."""
    if feed is None:
        return error_response(404, "no servers are watched", "start it with legroom ui --watch http://host:8000")
    return StreamingResponse(feed.events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _http_error(request: Request, error: HTTPException) -> Response:
    """An HTTP error of the framework as legroom's JSON error document."""
    answer = error_response(error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _internal_error(request: Request, error: Exception) -> Response:
    """The 500 response to a bug, without its details."""
    return error_response(500, "this is a bug in legroom, not in your input", "the server's terminal shows where", 70)
