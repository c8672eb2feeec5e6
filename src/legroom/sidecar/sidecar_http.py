"""The sidecar's HTTP: metrics, health and incidents; with a token, acknowledging and acting."""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.live.journal.journal_records import JournalUnavailable
from legroom.live.metrics.endpoint import host_name, is_loopback_host

if TYPE_CHECKING:
    from aiohttp import web

    from legroom.sidecar.sidecar import Sidecar

_MAX_BODY_BYTES = 64 * 1024  # Of a POST: a JSON object of three fields.


def make_app(served: Sidecar) -> web.Application:
    """The HTTP app with the sidecar's routes; any method but GET and HEAD needs the token."""
    from aiohttp import web  # slow to import

    async def metrics(_: web.Request) -> web.Response:
        text, kind = served.metrics_and_content_type()
        return web.Response(body=text, headers={"Content-Type": kind})

    async def healthz(_: web.Request) -> web.Response:
        health = served.health()
        return web.json_response(health, status=200 if health["ok"] else 503)

    async def incidents(request: web.Request) -> web.Response:
        since_s = _number_of_query(request.query.get("since_s"), "since_s")
        limit = min(int(_number_of_query(request.query.get("limit"), "limit") or 100), 1000)
        return web.json_response({"incidents": await served.incidents_json(since_s, limit)})

    async def ack(request: web.Request) -> web.Response:
        """Acknowledges the `incident` in the body, by `by`."""
        body = await _json_body(request)
        number = _row_id(body.get("incident"))
        if number is None:
            raise LegroomError("`incident` must be the number of one")
        await served.acknowledge(number, str(body.get("by", "somebody"))[:100])
        return web.json_response({"acknowledged": number})

    async def act(request: web.Request) -> web.Response:
        """Starts the `action` in the body on its `server`: 202, or 409 where the policy refuses."""
        body = await _json_body(request)
        undo = body.get("undo")
        if undo is not None and _row_id(undo) is None:
            raise LegroomError("`undo` must be the number of an action")
        answer = await served.act_on_request(str(body.get("action", "restart")), str(body.get("server", "")), undo)
        return web.json_response(answer, status=202 if answer["accepted"] else 409)

    @web.middleware
    async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
        """The handler's answer; an error where the Host is another machine's or a token is needed, or it fails."""
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
    """The 401 response to a wrong bearer token, 403 where none is set; None where it is right."""
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
    """A valid SQLite row id, else None."""
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 < given < 2**63 else None


def _number_of_query(text: str | None, name: str) -> float | None:
    """A query parameter as a number from 0 on; None where it is not given, LegroomError where it is wrong."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise LegroomError(f"`{name}` must be a number") from error
    if not 0 <= value < 1e12:
        raise LegroomError(f"`{name}` must be a number from 0 on")
    return value
