"""The ASGI application of `legroom ui`: the page, the endpoints over HTTP, and what is watched, as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from legroom.web.api_meters import ApiMeters, MeteredLayer
from legroom.web.endpoints import ENDPOINTS, ApiEndpoint
from legroom.web.openapi import openapi_document
from legroom.web.page_files import page_file
from legroom.web.pool import Refused, WorkerLimits, WorkerPool
from legroom.web.responses import error_response, refusal_response, worker_response
from legroom.web.security import COOKIE, Access, SecurityLayer

if TYPE_CHECKING:
    from legroom.web.live import LiveFeed

Handler = Callable[[Request], Awaitable[Response]]
LARGEST_BODY_BYTES = 80 << 20
"""Of a JSON request: a log of 64 MiB with what escaping adds."""
LARGEST_LOG_BYTES = 4 << 30
"""Of a log that is streamed."""
_LOG_TYPES = ("text/plain", "application/octet-stream")
_LONGEST_SILENCE_S = 30.0
"""Between two pieces of a body."""


def create_app(
    access: Access | None = None, limits: WorkerLimits | None = None, feed: LiveFeed | None = None, *, page: bool = True
) -> Starlette:
    """The application; `feed` is what it watches, if anything. Without `page` it is the API alone."""
    pool = WorkerPool(limits)
    meters = ApiMeters()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warmed(pool, meters))
        watching = asyncio.create_task(feed.run()) if feed is not None else None
        try:
            yield
        finally:
            meters.is_ready = False
            for task in (warming, watching):
                if task is not None:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
            await pool.close()

    routes: list[BaseRoute] = [
        Route("/healthz", _healthz),
        Route("/readyz", _readyz_handler(meters)),
        Route("/metrics", _metrics_handler(meters)),
        Route("/openapi.json", _openapi_handler(page)),
        *([Route("/api/live", _live_handler(feed))] if page else []),
        *(_endpoint_route(endpoint, pool) for endpoint in ENDPOINTS.values()),
        Route("/{path:path}", _page if page else _nothing),
    ]
    layers = [
        Middleware(MeteredLayer, meters=meters),
        Middleware(SecurityLayer, access=access or Access()),
        Middleware(GZipMiddleware, compresslevel=5),
    ]
    handlers = {HTTPException: _http_error, 500: _bug}
    return Starlette(routes=routes, middleware=layers, lifespan=lifespan, exception_handlers=handlers)  # type: ignore[arg-type]


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _warmed(pool: WorkerPool, meters: ApiMeters) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.warm_up())
        await pool.is_warm.wait()  # a visitor may be answered before the warm-up is
        meters.is_ready = True


def _readyz_handler(meters: ApiMeters) -> Handler:
    async def readyz(request: Request) -> Response:
        if meters.is_ready:
            return JSONResponse({"status": "ok"})
        return error_response(503, "it has just started, or is about to end", "ask again in a moment")

    return readyz


def _metrics_handler(meters: ApiMeters) -> Handler:
    async def metrics(request: Request) -> Response:
        return Response(meters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


def _openapi_handler(page: bool) -> Handler:
    async def openapi(request: Request) -> Response:
        return JSONResponse(openapi_document(live=page))

    return openapi


async def _nothing(request: Request) -> Response:
    path = request.url.path
    if path.removeprefix("/api/") in ENDPOINTS and path.startswith("/api/"):
        return _post_wanted(path)
    return error_response(404, f"there is nothing at {path}", "/openapi.json says what there is")


def _post_wanted(path: str) -> Response:
    answer = error_response(405, f"{path} wants a POST", "see /openapi.json")
    answer.headers["allow"] = "POST"
    return answer


async def _page(request: Request) -> Response:
    token = request.query_params.get("token")
    if token is not None:
        # Out of the address at once: it would stay in the browser's history.
        redirect = RedirectResponse(request.url.path, 303)
        redirect.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return redirect
    path = request.path_params["path"]
    if path.removeprefix("api/") in ENDPOINTS and path.startswith("api/"):
        return _post_wanted(f"/{path}")
    file = page_file(path, "served")
    if file is None:
        return error_response(404, f"there is nothing at {request.url.path}", "the page is at /")
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers={"etag": file.etag})
    return Response(file.body, headers={"etag": file.etag, "cache-control": "no-cache"}, media_type=file.media_type)


def _endpoint_route(endpoint: ApiEndpoint, pool: WorkerPool) -> Route:
    async def handle(request: Request) -> Response:
        try:
            if request.method != "POST":
                return worker_response(await pool.call(endpoint.name, b"{}"))
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            query = _query(request) if endpoint.name == "diagnose" else {}
            if kind in _LOG_TYPES and endpoint.name == "diagnose":
                return worker_response(await pool.diagnose(query, _pieces(request, LARGEST_LOG_BYTES)))
            if kind != "application/json":
                return error_response(415, "the request is not JSON", "send it as application/json")
            body = b"".join([piece async for piece in _pieces(request, LARGEST_BODY_BYTES)])
            return worker_response(await pool.call(endpoint.name, body, query))
        except Refused as refused:
            return refusal_response(refused)
        except ClientDisconnect:
            return Response(status_code=400)  # to nobody

    methods = ["GET", "POST"] if endpoint.without_input else ["POST"]
    return Route(f"/api/{endpoint.name}", handle, methods=methods)


def _query(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.query_params.items() if name != "token"}


async def _pieces(request: Request, most_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes, refused as soon as it is too large or has stopped coming."""
    told = request.headers.get("content-length", "")
    announced, come = int(told) if told.isascii() and told.isdigit() else 0, 0
    stream = aiter(request.stream())
    while max(announced, come) <= most_bytes:
        try:
            piece = await asyncio.wait_for(anext(stream), _LONGEST_SILENCE_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refused(408, "the request stopped coming", "send it again") from None
        come += len(piece)
        if piece:
            yield piece
    shown = f"{most_bytes / 2**30:.0f} GiB" if most_bytes >= 2**30 else f"{most_bytes >> 20} MiB"
    hint = "send the log as text/plain, its last run only, or use legroom diagnose FILE"
    raise Refused(413, f"the request is larger than {shown}", hint)


def _live_handler(feed: LiveFeed | None) -> Handler:
    async def live(request: Request) -> Response:
        if feed is None:
            hint = "start it with legroom ui --watch http://host:8000"
            return error_response(404, "no servers are watched", hint)
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    return live


async def _http_error(request: Request, error: HTTPException) -> Response:
    answer = error_response(error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(500, "this is a bug in legroom, not in your input", "the server's terminal shows where", 70)
